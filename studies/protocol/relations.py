"""How one model's score stands to another's: the relations that rules judge, and ratios in words."""

import math
import statistics
from collections.abc import Sequence

ALIKE = 1.02  # perplexities within this factor of each other are alike
# the relation that a ratio must satisfy -> its bounds, as a function of the margin
RELATIONS = {
    "better": lambda margin: (0.0, 1 / margin),
    "no worse": lambda margin: (0.0, margin),
    "alike": lambda margin: (1 / margin, margin),
}


def spread(ratios: Sequence[float]) -> str:
    """The geometric mean of ratios of each seed, with the smallest and largest."""
    middle = statistics.geometric_mean(ratios)
    if len(ratios) == 1:
        return f"{middle:.3f} (one seed) ×"
    return f"{middle:.3f} ({min(ratios):.3f}–{max(ratios):.3f}, {len(ratios)} seeds) ×"


def bounds(low: float, high: float, times: str = " ×") -> str:
    """The interval in which a ratio must be, in words."""
    if low <= 0:
        return f"at most {high:.4g}{times}"
    return f"at least {low:.4g}{times}" if math.isinf(high) else f"between {low:.4g} and {high:.4g}{times}"
