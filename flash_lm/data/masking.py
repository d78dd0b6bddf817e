"""Masked language modelling: which tokens of a row are hidden, and what stands in their place.

Of the chosen tokens 80 % become [MASK], 10 % a random token, 10 % stay as they are (Devlin et al. 2019, section 3.1).
The choice is a pure function of a key, so it changes from epoch to epoch and yet is the same after a resume.
"""

import numpy as np

from flash_lm.data.packing import Row
from flash_lm.data.tokenizers import Tokenizer

_MASKED, _RANDOM = 0.8, 0.1


class Masking:
    """Turns a causal row into a masked one."""

    def __init__(self, tokenizer: Tokenizer, rate: float):
        """Special tokens are neither chosen nor put in another's place.

        Args:
            tokenizer: of the rows.
            rate: share of the tokens to choose, between 0 and 1.
        """
        self._rate, self._mask = rate, tokenizer.mask
        self._ordinary = tokenizer.bytes_per_token() > 0
        self._drawn_from = np.flatnonzero(self._ordinary).astype(np.int32)

    def __call__(self, row: Row, *key: int) -> Row:
        """The masked row: the inputs are the targets, and the loss is of the chosen tokens.

        Args:
            row: of a packer.
            key: non-negative numbers that the choice depends on, such as seed, epoch, example.
        """
        # With the key's length, since a seed sequence ends in zeros: (5, 1) and (5, 1, 0) would be the same.
        draw = np.random.Generator(np.random.Philox(np.random.SeedSequence((len(key), *key))))
        targets = row["inputs_BxL"]
        choice, fate = draw.random((2, len(targets)))
        chosen = (choice < self._rate) & (row["segment_ids_BxL"] > 0) & self._ordinary[targets]
        others = draw.choice(self._drawn_from, len(targets))
        inputs = np.where(chosen & (fate < _MASKED), self._mask, targets)
        inputs = np.where(chosen & (fate >= 1 - _RANDOM), others, inputs).astype(np.int32)
        return row | {"inputs_BxL": inputs, "targets_BxL": targets, "loss_mask_BxL": chosen.astype(np.float32)}
