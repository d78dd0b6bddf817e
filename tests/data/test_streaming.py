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


def epoch(source) -> int:
    (position,) = source.state().values()
    return position["epoch"]


def first_epoch(folder, **settings):
    """The batches that begin in the first epoch of their one stream."""
    results, source = [], batches(folder, **settings)
    while epoch(source) == 0:
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
    full, positions = [], [source.state()[0]]
    for _ in range(40):  # more than an epoch
        full.append(next(source))
        positions.append(json.loads(json.dumps(source.state()[0])))
    assert positions[-1]["epoch"] > 0
    for start in range(34):
        again = batches(folder, pack, transform=masking, positions=[positions[start]], buffer=buffer)
        for expected, batch in zip(full[start : start + 6], again, strict=False):
            for name, x in expected.items():
                assert np.array_equal(x, batch[name])


def test_the_order_follows_the_seed_and_the_epoch(folder):
    first, again, other = (texts(first_epoch(folder, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other
    source = batches(folder, seed=1)
    second = texts(itertools.islice((b for b in source if epoch(source) == 1), 12))
    assert second[:40] != first[:40]


def test_streams_share_the_documents(folder):
    """Each document is in one stream, and a stream's rows of a batch are its own."""
    source, shares = batches(folder, streams=2), [[], []]
    while min(position["epoch"] for position in source.state().values()) == 0:
        epochs, batch = [source.state()[number]["epoch"] for number in range(2)], next(source)
        for number in range(2):
            rows = {name: x[2 * number : 2 * number + 2] for name, x in batch.items()}
            shares[number] += [] if epochs[number] else texts([rows])
    assert set(shares[0]) | set(shares[1]) == set(ROWS)
    assert len(shares[0]) + len(shares[1]) < len(ROWS) + 12  # the last batch reaches into the next epoch


# The rows of each host, of a batch of twelve: evenly, in any order of devices, with rows that several hosts need.
LAYOUTS = {
    "1": [range(12)],
    "2": [range(6), range(6, 12)],
    "3": [range(4 * host, 4 * host + 4) for host in range(3)],
    "4": [range(3 * host, 3 * host + 3) for host in range(4)],
    "2, in pieces": [(0, 1, 2, 9, 10, 11), (3, 4, 5, 6, 7, 8)],
    "2 with all rows": [range(12), range(12)],
    "3 that share some rows": [range(8), range(4, 12), (0, 1, 2, 3, 8, 9, 10, 11)],
}


def read_on_hosts(folder, layout: str, count: int, streams: int, positions=()) -> tuple[list[dict], list[dict]]:
    """The batches that hosts put together, and the positions of all streams after them, as a checkpoint has them."""
    settings = {"streams": streams, "positions": positions, "transform": Masking(BYTES, 0.3), "buffer": 400}
    hosts = [batches(folder, share=Share(12, rows), **settings) for rows in LAYOUTS[layout]]
    whole = []
    for _ in range(count):
        rows = {}
        for mine, batch in zip(LAYOUTS[layout], map(next, hosts), strict=True):
            for i, row in enumerate(mine):
                new = {name: x[i] for name, x in batch.items()}
                for name, x in rows.setdefault(row, new).items():  # hosts that read the same row agree
                    assert np.array_equal(x, new[name])
        whole.append({name: np.stack([rows[row][name] for row in range(12)]) for name in rows[0]})
    states = [json.loads(json.dumps([*host.state().items()])) for host in hosts]
    every = {number: position for state in states for number, position in state}
    assert all(every[number] == position for state in states for number, position in state)
    return whole, [every[number] for number in sorted(every)]


@pytest.mark.parametrize("streams", [1, 2, 5])
def test_any_number_of_hosts_continues_with_the_same_batches(folder, streams):
    """The hosts of one layout save, those of the next one go on; together they read what one host reads at once."""
    expected, _ = read_on_hosts(folder, "1", 3 * len(LAYOUTS), streams)
    actual, positions = [], []
    for layout in LAYOUTS:
        more, positions = read_on_hosts(folder, layout, 3, streams, positions)
        actual += more
        assert len(positions) == streams
    for batch, other in zip(actual, expected, strict=True):
        assert all(np.array_equal(batch[name], x) for name, x in other.items())


def test_a_host_reads_only_the_streams_of_its_rows(folder):
    assert batches(folder, share=Share(12, range(4, 6)), streams=6).state().keys() == {2}
    assert batches(folder, share=Share(12, (0, 11)), streams=6).state().keys() == {0, 5}


# Twelve rows on the hosts of a TPU slice, each with 2 x 2 chips: jax.make_mesh orders chips by their place.
INTERLEAVED = [(0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)]
ORDER = tuple(itertools.chain.from_iterable(INTERLEAVED))


def test_hosts_with_rows_in_pieces_read_one_stream_each_and_any_host_goes_on(folder):
    settings = {"transform": Masking(BYTES, 0.3), "buffer": 400, "streams": 3}
    hosts = [batches(folder, share=Share(12, rows, 3, ORDER), **settings) for rows in INTERLEAVED]
    assert [host.state().keys() for host in hosts] == [{0}, {1}, {2}]
    for host in hosts:
        next(host)
    positions = json.loads(json.dumps([host.state()[number] for number, host in enumerate(hosts)]))
    # One host, on which all rows are in order; and three with other rows.
    alone = batches(folder, positions=positions, share=Share(12, range(12), 1, tuple(range(12))), **settings)
    others = [
        (rows, batches(folder, positions=positions, share=Share(12, rows, 3, tuple(range(12))), **settings))
        for rows in LAYOUTS["3"]
    ]
    for _ in range(4):
        expected = next(alone)
        for rows, host in [*zip(INTERLEAVED, hosts, strict=True), *others]:
            assert all(np.array_equal(x, expected[name][list(rows)]) for name, x in next(host).items())
    assert [position["rows"] for position in alone.state().values()] == [list(rows) for rows in INTERLEAVED]


def test_positions_without_rows_are_those_of_blocks(folder):
    """As earlier versions saved them, and for a batch of another size."""
    alone = batches(folder, share=single_host_share(12), streams=3)
    next(alone)
    old = [{name: x for name, x in position.items() if name != "rows"} for position in alone.state().values()]
    again = batches(folder, share=Share(12, range(12), 3, ORDER), streams=3, positions=old)
    assert np.array_equal(next(again)["inputs_BxL"], next(alone)["inputs_BxL"])
    larger = batches(folder, share=Share(24, range(24)), streams=3, positions=[*alone.state().values()])
    assert [position["rows"] for position in larger.state().values()] == [[*range(8 * n, 8 * n + 8)] for n in range(3)]


def test_a_stream_that_fails_within_a_batch_keeps_the_position_before_it(folder):
    """The run is saved there; a row more or less would be lost or read twice."""
    source = batches(folder, streams=2)
    next(source)
    before = dict(source.state())
    rows, reader = source._rows[1]
    source._rows[1] = rows, itertools.chain(itertools.islice(reader, 1), fail())
    with pytest.raises(InputError, match="no network"):
        next(source)
    assert source.state() == before


def fail():
    raise InputError("no network")
    yield


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
    while (number := epoch(source)) < 2:
        epochs[number] += texts([next(source)])
    orders = [epochs[number][: len(ROWS) - 12] for number in (0, 1)]
    assert orders[0] != orders[1]
    neighbours = [set(itertools.pairwise(order)) for order in orders]
    assert len(neighbours[0] & neighbours[1]) < 10


def test_a_stream_without_text_ends_in_a_clear_line(tmp_path):
    pq.write_table(pa.table({"text": ["", " ", None]}), tmp_path / "train.parquet")
    with pytest.raises(InputError, match="no text in its training split"):
        next(batches(tmp_path))
