"""Prefix language modelling: chooses the prefix of each document, which has bidirectional attention.

The tokens after it are predicted, each from all before it (Raffel et al. 2020, arXiv:1910.10683, section 3.2.2; UniLM's
sequence-to-sequence mask, Dong et al. 2019, arXiv:1905.03197, section 2.3).
"""

import itertools

import numpy as np

from flash_lm.data.packing import Row
from flash_lm.errors import InputError


def example_prefix(row: Row, *key: int) -> Row:
    """Adds the prefix of an example to its row: the tokens before the first target. `key` is not used.

    Raises:
        InputError: nothing but begin-of-text is.
    """
    del key
    # The token before the first target predicts it, so it is still part of the prefix.
    asked = np.flatnonzero(row["loss_mask_BxL"])
    prefix = asked[0] + 1 if len(asked) else 0
    if prefix == 1:
        raise InputError(
            "task=prefix_lm needs examples with a first part that is given: use couplets, copy, or hf with "
            "data.pair_column, or task=causal_lm"
        )
    return row | {"prefix_BxL": np.full(len(row["inputs_BxL"]), prefix, np.int32)}


def random_prefixes(row: Row, *key: int) -> Row:
    """Adds prefixes to a row of text: splits each document at random, with a token or more on either side.

    Args:
        row: a row from a packer.
        key: non-negative numbers that the splits depend on, such as seed, epoch, example.
    """
    # The key's length is included, since a seed sequence ignores zeros at its end: (5, 1) would equal (5, 1, 0).
    draw = np.random.Generator(np.random.Philox(np.random.SeedSequence((len(key), *key))))
    # Draw a split for each document, but not for padding.
    segment_ids = row["segment_ids_BxL"]
    prefix = np.zeros_like(segment_ids)
    bounds = np.flatnonzero(np.diff(segment_ids, prepend=-1, append=-1))
    for start, stop in itertools.pairwise(bounds):
        if segment_ids[start]:
            prefix[start:stop] = draw.integers(1, stop - start, endpoint=True)
    # The last token of a prefix predicts the first one after it.
    first = np.repeat(bounds[:-1], np.diff(bounds))
    predicts = np.arange(len(prefix)) - first >= prefix - 1
    return row | {"prefix_BxL": prefix, "loss_mask_BxL": row["loss_mask_BxL"] * predicts}
