"""Shared by the tables of FLASH: families at 512 … 8192 tokens, each beside Transformer++ of the same length."""

from studies.tables.configs._small_scale import shrunk_length

FAMILIES = {
    "paper": ("transformer", "transformer_plus", "transformer_plus_plus", "flash_quad", "flash"),
    "small": ("transformer_plus_plus", "flash_quad", "flash"),
}
LENGTHS = {"paper": (512, 1024, 2048, 4096, 8192), "small": (512, 2048, 8192)}


def runs(scale: str = "paper") -> dict[str, dict]:
    """Named after the family and the length."""
    return {
        f"{family}_{length}": {"model.family": family, "model.max_length": length}
        for length in (shrunk_length(length, scale) for length in LENGTHS[scale])
        for family in FAMILIES[scale]
    }


def figures(of_runs: dict[tuple[str, int], float], scale: str) -> dict[str, float]:
    """The paper's figures by (family, length), by the name of the run that stands for them."""
    return {f"{family}_{shrunk_length(length, scale)}": value for (family, length), value in of_runs.items()}


def baseline(run: str) -> str:
    """The run that a run's speed is compared with."""
    return f"transformer_plus_plus_{run.rpartition('_')[2]}"
