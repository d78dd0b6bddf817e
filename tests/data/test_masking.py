"""Masked rows: which tokens are masked, by what, and that both depend on the key alone."""

import itertools

import numpy as np
import pytest
from small import write_corpus

from flash_lm.data.batches import FixedRows, IndexedBatches
from flash_lm.data.corpus import cut
from flash_lm.data.masking import Masking
from flash_lm.data.packing import PACKERS, empty_row
from flash_lm.data.share import Share, single_host_share
from flash_lm.data.tokenized_text import encode_in_memory
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.data.tokenizers import SentencePieceTokenizer, train_sentencepiece

LENGTH = 4000
BYTES = ByteTokenizer()


def row(padding: int = 100):
    """Letters, a special token at every tenth position, and padding at the end whose ids look like letters."""
    tokens = np.random.default_rng(0).integers(4, 260, LENGTH, dtype=np.int32)
    tokens[::10] = BYTES.begin
    segments = np.ones(LENGTH, np.int32)
    segments[LENGTH - padding :] = 0
    return empty_row(LENGTH) | {"inputs_BxL": tokens, "segment_ids_BxL": segments}


def test_shares_of_masked_random_and_kept_tokens():
    masked = Masking(BYTES, 0.15)
    rows = [masked(row(), 0, 0, i) for i in range(200)]
    chosen = np.concatenate([r["loss_mask_BxL"] for r in rows]) > 0
    inputs, targets = (np.concatenate([r[name] for r in rows]) for name in ("inputs_BxL", "targets_BxL"))
    allowed = np.tile((row()["inputs_BxL"] >= 4) & (row()["segment_ids_BxL"] > 0), 200)
    assert not chosen[~allowed].any()
    assert np.isclose(chosen[allowed].mean(), 0.15, atol=0.002)
    assert (inputs[~chosen] == targets[~chosen]).all()
    hidden = inputs[chosen] == BYTES.mask
    same = inputs[chosen] == targets[chosen]
    assert np.isclose(hidden.mean(), 0.8, atol=0.005)
    # A random token equals the original one in one case of 256.
    assert np.isclose(same.mean(), 0.1 + 0.1 / 256, atol=0.005)
    others = inputs[chosen][~hidden & ~same]
    assert others.min() == 4 and others.max() == 259
    assert np.bincount(others)[4:].min() > 10


def test_targets_are_the_text_and_the_rest_of_the_row_is_untouched():
    source = row()
    masked = Masking(BYTES, 0.5)(source, 1)
    assert (masked["targets_BxL"] == source["inputs_BxL"]).all()
    assert masked.keys() == source.keys()
    for name, x in masked.items():
        assert x.dtype == source[name].dtype and x.shape == source[name].shape
    assert (masked["segment_ids_BxL"] == source["segment_ids_BxL"]).all()
    assert (source["inputs_BxL"] == row()["inputs_BxL"]).all()


def test_a_pure_function_of_its_key():
    masking = Masking(BYTES, 0.15)
    keys = [key for length in (1, 2, 3, 5) for key in itertools.product((0, 1), repeat=length)]
    draws = {key: masking(row(), *key)["loss_mask_BxL"].tobytes() for key in keys}
    assert len(set(draws.values())) == len(draws)
    again = Masking(BYTES, 0.15)
    assert all(again(row(), *key)["loss_mask_BxL"].tobytes() == value for key, value in draws.items())


@pytest.fixture(scope="module")
def rows():
    text = "".join(f"line {i} of the only document\n" for i in range(60))
    return PACKERS["stream"](encode_in_memory(list(cut(text)), BYTES), 64, BYTES.begin)


def flat(batches, name, count):
    return np.concatenate([batch[name] for batch in itertools.islice(batches, count)])


def test_masks_follow_the_example_and_change_with_the_epoch(rows):
    n, masking = len(rows), Masking(BYTES, 0.3)
    settings = {"seed": 5, "start_step": 0, "transform": masking}
    batches = flat(IndexedBatches(rows, single_host_share(4), **settings), "inputs_BxL", -(-2 * n // 4))
    expected = {epoch: {masking(rows[i], 5, epoch, i)["inputs_BxL"].tobytes() for i in range(n)} for epoch in (0, 1)}
    for epoch in (0, 1):
        got = {x.tobytes() for x in batches[epoch * n : (epoch + 1) * n]}
        assert got == expected[epoch]
    assert not expected[0] & expected[1]


@pytest.mark.parametrize("hosts", [1, 2])
def test_masks_do_not_depend_on_hosts_or_on_the_step_of_a_resume(rows, hosts):
    masking = Masking(BYTES, 0.3)
    uninterrupted = flat(
        IndexedBatches(rows, single_host_share(4), seed=1, start_step=0, transform=masking), "inputs_BxL", 12
    )
    shares = [
        flat(IndexedBatches(rows, Share(4, mine), seed=1, start_step=3, transform=masking), "inputs_BxL", 9)
        for mine in np.arange(4).reshape(hosts, -1).tolist()
    ]
    for h, share in enumerate(shares):
        steps = uninterrupted[12:].reshape(-1, hosts, 4 // hosts, uninterrupted.shape[-1])
        assert (share == steps[:, h].reshape(share.shape)).all()


def test_masks_of_an_evaluation_are_fixed(rows):
    first, second = (FixedRows(rows, Masking(BYTES, 0.15)) for _ in range(2))
    assert len(first) == len(rows)
    masks = [first[i]["loss_mask_BxL"].tobytes() for i in range(len(rows))]
    assert masks == [second[i]["loss_mask_BxL"].tobytes() for i in range(len(rows))]
    assert len(set(masks)) > len(masks) // 2


@pytest.mark.parametrize("pack", PACKERS)
def test_every_token_of_the_rows_can_be_chosen(pack):
    """In a causal row the first token is never predicted; over many draws every token is masked."""
    store = encode_in_memory(list(cut("abcdefghijklmnopqrstuvwxyz\n" * 5)), BYTES)
    packed = PACKERS[pack](store, 32, BYTES.begin)
    for i in range(len(packed)):
        counts = sum(Masking(BYTES, 0.5)(packed[i], draw)["loss_mask_BxL"] for draw in range(30))
        text = (packed[i]["inputs_BxL"] >= 4) & (packed[i]["segment_ids_BxL"] > 0)
        assert ((counts > 0) == text).all()


def test_the_mask_token_of_a_tokenizer(tmp_path):
    write_corpus(tmp_path)
    lines = [line for path in sorted(tmp_path.iterdir()) for line in path.read_text().splitlines(keepends=True)]
    trained = train_sentencepiece(lines, 320)
    assert trained.mask == BYTES.mask == 3
    assert trained.bytes_per_token()[trained.mask] == 0
    # A foreign model has no [MASK]; it gets the id after the last, which only masked models need.
    foreign = SentencePieceTokenizer(trained.model_bytes().replace(b"[MASK]", b"[KASM]"))
    assert foreign.vocab_size == trained.vocab_size == foreign.mask
    assert len(foreign.bytes_per_token()) == foreign.vocab_size
    masked = Masking(foreign, 0.5)(row() | {"inputs_BxL": np.full(LENGTH, 300, np.int32)}, 0)
    assert masked["inputs_BxL"].max() == foreign.mask and masked["targets_BxL"].max() == 300
    ids = foreign.encode(["the cat sees"])[0]
    assert foreign.decode([*ids, foreign.mask]) == "the cat sees"
