"""Shared by the tables of FLASH: families at 512 … 8192 tokens, compared with Transformer++ at the same length."""

from flash_lm.configs.tables._small_scale import shrunk_length

FAMILIES = {
    "paper": ("transformer", "transformer_plus", "transformer_plus_plus", "flash_quad", "flash"),
    "small": ("transformer_plus_plus", "flash_quad", "flash"),
}
LENGTHS = {"paper": (512, 1024, 2048, 4096, 8192), "small": (512, 2048, 8192)}


def runs(scale: str = "paper") -> dict[str, dict]:
    """Returns the runs, named by family and length."""
    return {
        f"{family}_{length}": {"model.family": family, "model.max_length": length}
        for length in (shrunk_length(length, scale) for length in LENGTHS[scale])
        for family in FAMILIES[scale]
    }


def figures(of_runs: dict[tuple[str, int], float], scale: str) -> dict[str, float]:
    """Returns the paper's figures by name of the run, from those by (family, length)."""
    return {f"{family}_{shrunk_length(length, scale)}": value for (family, length), value in of_runs.items()}


def baseline(run: str) -> str:
    """Returns the run whose speed a run is compared with."""
    return f"transformer_plus_plus_{run.rpartition('_')[2]}"
