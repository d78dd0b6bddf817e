"""Chips by name: peak rates, memory and bandwidth.

A device that is not in the table has no peak and so no fraction of it: a wrong one is worse than none.
"""

import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Chip:
    """A row of the table of chips.

    Attributes:
        kind: pattern of JAX's names for the device.
        peaks: dense products with float32 sums by dtype of the operands, TFLOP/s per JAX device, without sparsity. With
            JAX's default precision, float32 products are computed in TF32 on these GPUs, and in one bfloat16 pass on
            TPUs.
        memory: GB.
        bandwidth: of the memory, GB/s.
        name: for XLA's compiler ahead of time: of a TPU's topologies, or JAX's of a GPU; None: only the chip compiles.
    """

    kind: str
    peaks: dict[str, float]
    memory: float
    bandwidth: float
    name: str | None = None

    def peak_flops(self, dtype: str) -> float | None:
        """Peak FLOP/s of products of this dtype; None: unknown."""
        return self.peaks[dtype] * 1e12 if dtype in self.peaks else None


# Sources: NVIDIA's data sheets of each GPU (their figures with sparsity halved); Google Cloud's TPU documentation, the
# page of each version.
CHIPS = {
    "B200": Chip(r"NVIDIA B200", {"bfloat16": 2250, "float32": 1125}, 180, 7700),
    "H200": Chip(r"NVIDIA H200", {"bfloat16": 989, "float32": 494}, 141, 4800, "NVIDIA H200"),
    "H100 PCIe": Chip(r"NVIDIA H100 PCIe", {"bfloat16": 756, "float32": 378}, 80, 2000),
    "H100": Chip(r"NVIDIA H100 80GB HBM3", {"bfloat16": 989, "float32": 494}, 80, 3350, "NVIDIA H100 80GB HBM3"),
    "A100": Chip(r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", {"bfloat16": 312, "float32": 156}, 80, 2039),
    "L40S": Chip(r"NVIDIA L40S", {"bfloat16": 362, "float32": 183}, 48, 864),
    "L4": Chip(r"NVIDIA L4", {"bfloat16": 121, "float32": 60}, 24, 300),
    "TPU v4": Chip(r"TPU v4", {"bfloat16": 275, "float32": 275}, 32, 1200),
    "TPU v5e": Chip(r"TPU v5 lite|TPU v5e", {"bfloat16": 197, "float32": 197}, 16, 819, "v5e"),
    "TPU v5p": Chip(r"TPU v5p?", {"bfloat16": 459, "float32": 459}, 95, 2765, "v5p"),
    "TPU v6e": Chip(r"TPU v6 lite|TPU v6e", {"bfloat16": 918, "float32": 918}, 32, 1640, "v6e"),
}


def find_chip(device_kind: str) -> str | None:
    """Returns the row of the table for JAX's name of a device; None: it has none."""
    return next((name for name, chip in CHIPS.items() if re.fullmatch(chip.kind, device_kind)), None)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Returns the peak FLOP/s of a device's matrix products.

    Args:
        device_kind: JAX's name for the device.
        dtype: dtype of the operands.

    Returns:
        The rate; None if it is unknown.
    """
    name = find_chip(device_kind)
    return CHIPS[name].peak_flops(dtype) if name else None
