"""Masked language modelling: which tokens of a row are hidden, and what replaces them.

Of the chosen tokens, 80 % become [MASK], 10 % become a random token and 10 % stay the same (Devlin et al. 2019, section
3.1). The choice is a pure function of a key, so it changes from epoch to epoch and is the same after a resume.
"""

import numpy as np

from flash_lm.data.packing import Row
from flash_lm.data.tokenizer import Tokenizer

_MASKED, _RANDOM = 0.8, 0.1


class Masking:
    """Turns a row for causal language modelling into one for masked language modelling."""

    def __init__(self, tokenizer: Tokenizer, rate: float):
        """Special tokens are neither chosen nor used as random tokens.

        Args:
            tokenizer: the rows' tokenizer.
            rate: share of the tokens to choose, between 0 and 1.
        """
        self._rate, self._mask = rate, tokenizer.mask
        self._ordinary = tokenizer.bytes_per_token() > 0
        self._drawn_from = np.flatnonzero(self._ordinary).astype(np.int32)

    def __call__(self, row: Row, *key: int) -> Row:
        """The masked row: the original inputs are the targets, and only chosen tokens count in the loss.

        Args:
            row: a row from a packer.
            key: non-negative numbers that the choice depends on, such as seed, epoch, example.
        """
        # The key's length is included, since a seed sequence ignores zeros at its end: (5, 1) would equal (5, 1, 0).
        draw = np.random.Generator(np.random.Philox(np.random.SeedSequence((len(key), *key))))
        targets = row["inputs_BxL"]
        choice, fate = draw.random((2, len(targets)))
        chosen = (choice < self._rate) & (row["segment_ids_BxL"] > 0) & self._ordinary[targets]
        others = draw.choice(self._drawn_from, len(targets))
        inputs = np.where(chosen & (fate < _MASKED), self._mask, targets)
        inputs = np.where(chosen & (fate >= 1 - _RANDOM), others, inputs).astype(np.int32)
        return row | {"inputs_BxL": inputs, "targets_BxL": targets, "loss_mask_BxL": chosen.astype(np.float32)}
