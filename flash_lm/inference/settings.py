"""The settings of generation. Imports nothing slow, so that --help is quick."""

import dataclasses
import secrets
from typing import Any

from flash_lm.errors import InputError

MIN_TEMPERATURE = 1e-4  # above 0; also the divisor at temperature 0, whose result is not used
_TOP_K = 2**31 - 1
_MOST_BEAMS = 256
_SEEDS = range(-(2**63), 2**63)

# flag -> its type, its default, and its help text
Flags = dict[str, tuple[type, Any, str]]
CAUSAL_ONLY: Flags = {
    "max_tokens": (int, 200, "new tokens"),
    "seed": (int, 0, "random seed; -1: another one each time"),
    "samples": (int, 1, "samples of the same prompt, in one batch (8 for couplets)"),
    "beams": (int, None, "search with so many beams instead of sampling; --samples of them are shown"),
    "length_penalty": (float, 0.6, "of the search: 0 ranks answers by probability, more prefers longer ones"),
    "continuation": (str, None, "a text to score after the prompt instead of generating one"),
    "system": (str, None, "with --chat: the message of the system, before the prompt"),
}
MASKED_ONLY: Flags = {"candidates": (int, 5, "candidates per mask")}
SAMPLING_HELP = {
    "temperature": "divides the logits; 0: always the most likely token",
    "top_k": "choose from the k most likely tokens; 0: from all",
    "top_p": "choose from the most likely tokens that together have this probability",
    "min_p": "choose from tokens with at least this share of the highest probability",
    "repetition_penalty": "above 1: tokens that are already there become less likely",
}


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of `sampling.draw_tokens`; the defaults have no effect.

    Attributes:
        temperature: divides the logits; 0: always the most likely token.
        top_k: only the k most likely tokens; 0: all.
        top_p: only the most likely tokens that together have this probability (Holtzman et al. 2020).
        min_p: only tokens with at least this share of the highest probability.
        repetition_penalty: for tokens already in the prompt or the output: divides positive logits, multiplies the
            others (CTRL, Keskar et al. 2019, section 4.1).
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self):
        """Checks the ranges.

        Raises:
            InputError: settings are out of range, one per line.
        """
        # A temperature between 0 and the smallest one would overflow the logits.
        ranges = {
            "temperature": (
                self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= 1e4,
                "0 (always the most likely token), or from 0.0001 to 10000",
            ),
            "top_k": (0 <= self.top_k <= _TOP_K, f"from 0 (all tokens) to {_TOP_K}"),
            "top_p": (1e-6 <= self.top_p <= 1, "from 0.000001 to 1 (all tokens)"),
            "min_p": (0 <= self.min_p <= 1, "from 0 (all tokens) to 1"),
            "repetition_penalty": (1e-3 <= self.repetition_penalty <= 1e3, "from 0.001 to 1000; 1 is none"),
        }
        _check(self, ranges)

    @property
    def filters(self) -> bool:
        """Whether a filter removes tokens; the logits must then be sorted."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclasses.dataclass(frozen=True)
class BeamSearch:
    """Settings of `Engine.search`; the defaults are those of Vaswani et al. 2017, section 6.1.

    Attributes:
        beams: number of beams.
        length_penalty: α of the score, see `inference.beams`.
    """

    beams: int = 4
    length_penalty: float = 0.6

    def __post_init__(self):
        """Checks the ranges.

        Raises:
            InputError: settings are out of range, one per line.
        """
        ranges = {
            "beams": (1 <= self.beams <= _MOST_BEAMS, f"from 1 to {_MOST_BEAMS}"),
            "length_penalty": (0 <= self.length_penalty <= 10, "from 0 (none) to 10"),
        }
        _check(self, ranges)


def draw_seed(seed: int) -> int:
    """Returns the seed, or a random one for -1.

    Raises:
        InputError: it does not fit into 64 bits.
    """
    if seed not in _SEEDS:
        raise InputError(f"seed={seed} must be from {_SEEDS[0]} to {_SEEDS[-1]}")
    return secrets.randbits(32) if seed == -1 else seed


def _check(settings: Any, ranges: dict[str, tuple[bool, str]]) -> None:
    problems = [
        f"{name}={getattr(settings, name)} must be {text}" for name, (is_valid, text) in ranges.items() if not is_valid
    ]
    if problems:
        raise InputError.of(problems)
