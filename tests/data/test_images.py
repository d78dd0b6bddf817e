"""Images as sequences of pixels, from idx files and from a data set of the hub."""

import gzip

import numpy as np
import PIL.Image
import pytest

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data.corpus import SPLITS
from flash_lm.data.labelled import LabelledRows
from flash_lm.data.splits import ROWS, load_splits
from flash_lm.errors import InputError

SHAPE = (5, 3)


def pixels(count: int, seed: int, shape=SHAPE) -> np.ndarray:
    return np.random.default_rng(seed).integers(256, size=(count, *shape)).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.tobytes()


def write(folder, compressed=True):
    for name, array in (("train", pixels(24, 0)), ("t10k", pixels(4, 1))):
        data, path = idx(array), folder / f"{name}-images-idx3-ubyte"
        if compressed:
            path.with_name(path.name + ".gz").write_bytes(gzip.compress(data))
        else:
            path.write_bytes(data)
    return folder


def load(**data):
    config = get_config()
    config.data.update(corpus="images", pack="examples", length=16)
    config.data.update_from_flattened_dict(data)
    return load_splits(parse(config).data)


@pytest.mark.parametrize("compressed", [True, False])
def test_a_row_is_an_image_and_every_pixel_counts(tmp_path, compressed):
    corpus = load(path=str(write(tmp_path, compressed)))
    assert {split: len(corpus.splits[split]) for split in SPLITS} == {"train": 22, "validation": 2, "test": 4}
    row = ROWS["examples"](corpus.splits["test"], 16, corpus.tokenizer.begin)[3]
    assert (row["targets_BxL"][:15] - 4).tolist() == pixels(4, 1)[3].reshape(-1).tolist()
    assert row["inputs_BxL"][0] == corpus.tokenizer.begin
    assert row["inputs_BxL"][1:15].tolist() == row["targets_BxL"][:14].tolist()
    assert row["loss_mask_BxL"].tolist() == [1] * 15 + [0]
    assert (
        corpus.tokenizer.bytes_per_token()[row["targets_BxL"][:15]] == 1
    ).all()  # so bits per byte are bits per pixel


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda path: path.unlink(), "has no t10k-images-idx3-ubyte or t10k-images-idx3-ubyte.gz"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "not an idx file of images, or is damaged"),
        (lambda path: path.write_bytes(b"\0\0\x08\x01" + path.read_bytes()[4:]), "not an idx file of images"),
        (lambda path: path.write_bytes(b""), "not an idx file of images"),
        (lambda path: path.write_bytes(idx(pixels(0, 0))), "has no image for test"),
        (lambda path: path.write_bytes(idx(pixels(2, 0, (2, 2)))), "have 2×2 and 5×3 values"),
    ],
)
def test_damaged_files(tmp_path, damage, expected):
    damage(write(tmp_path, compressed=False) / "t10k-images-idx3-ubyte")
    with pytest.raises(InputError, match=expected):
        load(path=str(tmp_path))


def test_a_damaged_archive(tmp_path):
    path = write(tmp_path) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:20])
    with pytest.raises(InputError, match="cannot read"):
        load(path=str(tmp_path))


def test_a_data_set_of_the_hub(monkeypatch):
    """With colours; the network is replaced by a fake."""
    datasets = pytest.importorskip("datasets")
    actual = {
        split: datasets.Dataset.from_dict({"img": pixels(n, seed, (2, 2, 3)).tolist()})
        for seed, (split, n) in enumerate({"train": 24, "test": 4}.items())
    }
    monkeypatch.setattr(datasets, "load_dataset", lambda name, config: datasets.DatasetDict(actual))
    corpus = load(name="someone/colours")
    assert corpus.name == "someone--colours"
    ids = corpus.splits["test"].example(2, 16).ids
    assert (ids[1:] - 4).tolist() == pixels(4, 1, (2, 2, 3))[2].reshape(-1).tolist()
    actual["train"] = actual["train"].rename_column("img", "picture")
    with pytest.raises(InputError, match="with a column image or img, and has train, test with no column"):
        load(name="someone/colours")


def test_a_folder_and_a_name_exclude_each_other():
    with pytest.raises(InputError, match="data.corpus=images needs either data.name"):
        load()


def write_labels(folder, counts=(24, 4)):
    write(folder)
    for name, count in zip(("train", "t10k"), counts, strict=True):
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx((np.arange(count) % 3).astype(np.uint8)))
    return folder


def test_labels_of_idx_files(tmp_path):
    """They do not change the fingerprint: older runs on these images had no labels."""
    plain = load(path=str(write(tmp_path)))
    corpus = load(path=str(write_labels(tmp_path)))
    assert plain.labels == () and corpus.labels == ("0", "1", "2") and corpus.fingerprint == plain.fingerprint
    rows = LabelledRows(corpus.splits["test"], 16, corpus.tokenizer.begin)
    assert [int(rows[i]["targets_BxL"][0]) for i in range(4)] == [0, 1, 2, 0]
    assert (rows[1]["inputs_BxL"][1:] - 4).tolist() == pixels(4, 1)[1].reshape(-1).tolist()
    assert corpus.splits["validation"].labels.tolist() == [1, 2]  # 22 and 23 modulo 3
    with pytest.raises(InputError, match="rows of 15 tokens are too short for the examples, which have 16"):
        LabelledRows(corpus.splits["test"], 15, 0)


def test_more_images_than_labels(tmp_path):
    with pytest.raises(InputError, match="has 24 images and 23 labels for train"):
        load(path=str(write_labels(tmp_path, (23, 4))))


@pytest.mark.parametrize("gray", [True, False])
def test_a_folder_of_pictures(tmp_path, gray):
    """train/LABEL/NAME.png, as in some copies of CIFAR-10."""
    for split, count in (("train", 12), ("test", 2)):
        for label in ("cat", "dog"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(count):
                picture = PIL.Image.fromarray(pixels(1, i + 100 * (label == "dog"), (2, 2, 3))[0])
                picture.save(tmp_path / split / label / f"{i:02}.png")
    corpus = load(path=str(tmp_path), **{"images.gray": True} if gray else {})
    assert corpus.labels == ("cat", "dog")
    assert {split: len(corpus.splits[split]) for split in SPLITS} == {"train": 22, "validation": 2, "test": 4}
    test = corpus.splits["test"]
    assert sorted(test.labels.tolist()) == [0, 0, 1, 1]
    # Files are sorted by label, and the validation split must have all labels.
    assert sorted(corpus.splits["validation"].labels.tolist()) == [0, 1]
    actual = test.pixels[test.labels == 1][1]
    colours = pixels(1, 101, (2, 2, 3))[0]
    if not gray:
        assert actual.tolist() == colours.tolist()
        return
    luma = colours @ np.array([299, 587, 114]) / 1000  # ITU-R 601
    assert actual.shape == (2, 2) and np.abs(actual - luma).max() <= 1


def test_a_picture_that_cannot_be_read(tmp_path):
    for split in ("train", "test"):
        (tmp_path / split / "cat").mkdir(parents=True)
        (tmp_path / split / "cat" / "a.png").write_bytes(b"no picture")
    with pytest.raises(InputError, match="has an image that cannot be read|cannot load data.path"):
        load(path=str(tmp_path))
