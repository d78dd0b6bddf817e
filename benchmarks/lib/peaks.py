"""Peak rates of known accelerators, to express a model's FLOP/s as a fraction of the peak.

A device that is not in the table has no peak and so no fraction: a wrong one is worse than none.
"""

import re

# Dense products with float32 sums, in TFLOP/s per JAX device, without sparsity. With JAX's default precision, float32
# products are computed in TF32 on these GPUs, and in one bfloat16 pass on TPUs.
# Sources: NVIDIA's data sheets of each GPU (their figures with sparsity halved); Google Cloud's TPU documentation, the
# page of each version.
_PEAKS: tuple[tuple[str, dict[str, float]], ...] = (
    (r"NVIDIA B200", {"bfloat16": 2250, "float32": 1125}),
    (r"NVIDIA H200", {"bfloat16": 989, "float32": 494}),
    (r"NVIDIA H100 PCIe", {"bfloat16": 756, "float32": 378}),
    (r"NVIDIA H100 80GB HBM3", {"bfloat16": 989, "float32": 494}),
    (r"NVIDIA A100-(SXM4|PCIE)-\d+GB|NVIDIA A100 80GB PCIe", {"bfloat16": 312, "float32": 156}),
    (r"NVIDIA L40S", {"bfloat16": 362, "float32": 183}),
    (r"NVIDIA L4", {"bfloat16": 121, "float32": 60}),
    (r"TPU v4", {"bfloat16": 275, "float32": 275}),
    (r"TPU v5 lite|TPU v5e", {"bfloat16": 197, "float32": 197}),
    (r"TPU v5p?", {"bfloat16": 459, "float32": 459}),
    (r"TPU v6 lite|TPU v6e", {"bfloat16": 918, "float32": 918}),
)


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Returns the peak FLOP/s of a device's matrix products.

    Args:
        device_kind: JAX's name for the device.
        dtype: dtype of the operands.

    Returns:
        The rate; None if it is unknown.
    """
    for kind, rates in _PEAKS:
        if re.fullmatch(kind, device_kind):
            return rates[dtype] * 1e12 if dtype in rates else None
    return None
