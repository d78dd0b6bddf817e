"""Batches of a stream: documents once per epoch, exact resume at any position, disjoint hosts, errors of the thread."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data import streaming
from flash_lm.data.hugging_face import DatasetStream
from flash_lm.data.masking import Masking
from flash_lm.data.packing import PACKERS
from flash_lm.data.share import Share, single_host_share
from flash_lm.data.streaming import StreamedBatches
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.errors import InputError

ROWS = [f"<{i:03}>" + "abcdefgh"[: i % 9] for i in range(100)]
BYTES = ByteTokenizer()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("stream")
    pq.write_table(pa.table({"text": ROWS}), path / "train.parquet", row_group_size=7)
    return path


@pytest.fixture(autouse=True)
def _small_windows(monkeypatch):
    monkeypatch.setattr(streaming, "_WINDOW", 90)


def batches(folder, pack="documents", **settings):
    rows = load_dataset("parquet", data_files=str(folder / "train.parquet"), streaming=True)["train"]
    config = get_config()
    config.data.update(corpus="hf", path=str(folder), tokens_per_batch=512)
    stream = DatasetStream(parse(config).data, rows, held_out=0)
    share = settings.pop("share", single_host_share(4))
    return StreamedBatches(stream, BYTES, PACKERS[pack], 16, share, **{"seed": 0, "buffer": 0} | settings)


def texts(packed_batches) -> list[str]:
    """The documents of batches packed as documents, in order; each is shorter than a row."""
    texts = []
    for batch in packed_batches:
        for tokens, segments in zip(batch["inputs_BxL"], batch["segment_ids_BxL"], strict=True):
            texts += [BYTES.decode(tokens[segments == i]) for i in range(1, segments.max() + 1)]
    return texts


def first_epoch(folder, **settings):
    """The batches that begin in the first epoch."""
    results, source = [], batches(folder, **settings)
    while source.state()["epoch"] == 0:
        results.append(next(source))
    return results


def test_an_epoch_has_each_document_once(folder):
    actual = texts(first_epoch(folder))
    # The last batch may reach into the next epoch.
    assert set(actual) == set(ROWS)
    assert len(ROWS) <= len(actual) <= len(ROWS) + 12
    assert actual[: len(ROWS)] != ROWS


@pytest.mark.parametrize("buffer", [0, 400])
@pytest.mark.parametrize("pack", PACKERS)
def test_any_position_is_resumed_exactly(folder, pack, buffer):
    masking = Masking(BYTES, 0.3)
    source = batches(folder, pack, transform=masking, buffer=buffer)
    full, positions = [], [source.state()]
    for _ in range(40):  # more than an epoch
        full.append(next(source))
        positions.append(json.loads(json.dumps(source.state())))
    assert positions[-1]["epoch"] > 0
    for start in range(34):
        again = batches(folder, pack, transform=masking, position=positions[start], buffer=buffer)
        for expected, batch in zip(full[start : start + 6], again, strict=False):
            for name, x in expected.items():
                assert np.array_equal(x, batch[name])


def test_the_order_follows_the_seed_and_the_epoch(folder):
    first, again, other = (texts(first_epoch(folder, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    source = batches(folder, seed=1)
    second = texts(itertools.islice((b for b in source if source.state()["epoch"] == 1), 12))
    assert second[:40] != first[:40]


def test_hosts_share_the_documents(folder):
    shares = [texts(first_epoch(folder, share=Share(4, (2 * h, 2 * h + 1), h, 2))) for h in range(2)]
    assert set(shares[0]) | set(shares[1]) == set(ROWS)
    assert not set(shares[0]) & set(shares[1])


def distance(documents: list[str]) -> float:
    """Average distance of a document from its position in the stream."""
    return float(np.mean([abs(ROWS.index(text) - i) for i, text in enumerate(documents)]))


def test_documents_are_shuffled_over_the_full_buffer(folder):
    """With a buffer over all documents, they move by a third of the stream on average."""
    plain, buffered = (texts(first_epoch(folder, buffer=buffer))[: len(ROWS)] for buffer in (0, 10_000))
    assert set(buffered) == set(ROWS)
    assert distance(plain) < 10 and 25 < distance(buffered) < 42


def test_each_epoch_has_another_order_of_documents(folder):
    source, epochs = batches(folder, buffer=10_000), {0: [], 1: []}
    while (number := source.state()["epoch"]) < 2:
        epochs[number] += texts([next(source)])
    orders = [epochs[number][: len(ROWS) - 12] for number in (0, 1)]
    assert orders[0] != orders[1]
    neighbours = [set(itertools.pairwise(order)) for order in orders]
    assert len(neighbours[0] & neighbours[1]) < 10


def test_a_stream_without_text_ends_in_a_clear_line(tmp_path):
    pq.write_table(pa.table({"text": ["", " ", None]}), tmp_path / "train.parquet")
    with pytest.raises(InputError, match="no text in its training split"):
        next(batches(tmp_path))
