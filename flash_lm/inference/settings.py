"""What flags of generation say: it imports nothing slow, so that --help is quick."""

import dataclasses
from typing import Any

from flash_lm.errors import InputError

COLDEST = 1e-4  # also what a temperature of 0 divides by, whose result is not used
_TOP_K = 2**31 - 1

# flag -> its type, its default, and what it is
Flags = dict[str, tuple[type, Any, str]]
CAUSAL_ONLY: Flags = {
    "max_tokens": (int, 200, "new tokens"),
    "seed": (int, 0, "of the draws"),
    "samples": (int, 1, "of the same prompt, all at once (8 of a couplet)"),
    "continuation": (str, None, "a text to score after the prompt instead of generating one"),
}
MASKED_ONLY: Flags = {"candidates": (int, 5, "a mask")}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of `sampling.draw_tokens`; those that are left as they are do nothing.

    Attributes:
        temperature: logits are divided by it; 0: always the likeliest token.
        top_k: only the k likeliest; 0: all.
        top_p: only the likeliest that together have this probability (Holtzman et al. 2020).
        min_p: only those that have at least this share of the likeliest one's probability.
        repetition_penalty: logits of tokens of the prompt or the output are divided by it if positive, and multiplied
            if not (CTRL, Keskar et al. 2019, section 4.1).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        """Checks the ranges.

        Raises:
            InputError: with everything that is wrong, one a line.
        """
        good = {
            "temperature": (
                self.temperature == 0 or COLDEST <= self.temperature <= 1e4,
                "0 (always the likeliest token), or from 0.0001 to 10000",
            ),
            "top_k": (0 <= self.top_k <= _TOP_K, f"from 0 (all tokens) to {_TOP_K}"),
            "top_p": (1e-6 <= self.top_p <= 1, "from 0.000001 to 1 (all tokens)"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (all tokens) to 1"),
            "repetition_penalty": (1e-3 <= self.repetition_penalty <= 1e3, "from 0.001 to 1000; 1 is none"),
        }
        problems = [
            f"{name}={getattr(self, name)} must be {wanted}" for name, (fine, wanted) in good.items() if not fine
        ]
        if problems:
            raise InputError.of(problems)

    @property
    def filters(self) -> bool:
        """Whether tokens are left out, for which the logits must be sorted."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
