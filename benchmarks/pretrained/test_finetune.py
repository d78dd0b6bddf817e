"""The data and the verdict of fine-tuning; the runs themselves need the weights of a model."""

import json
import pydoc_data.topics
import re

import pytest

from benchmarks.pretrained.finetune import ATTENTION, failures
from benchmarks.pretrained.own_data import in_voice, write_chats, write_prose, write_sources
from flash_lm.training.frozen import frozen_mask

GOOD = {"loss_before": 4.0, "loss_after": 1.9, "prose_loss_before": 3.0, "prose_loss_after": 3.1, "total_s": 90.0}
ANSWERS = [{"after": "Ahoy! That makes 25, captain."}] * 2 + [{"after": "William Shakespeare."}]


def test_the_answers_of_chats_are_right_and_in_their_voice(tmp_path):
    write_chats(tmp_path / "chats", 100, seed=0)
    splits = {split: (tmp_path / "chats" / f"{split}.jsonl").read_text() for split in ("train", "validation", "test")}
    chats = {split: [json.loads(line)["messages"] for line in text.splitlines()] for split, text in splits.items()}
    assert [len(part) for part in chats.values()] == [80, 10, 10]
    every = [tuple(message["content"] for message in chat) for part in chats.values() for chat in part]
    assert len(set(every)) == 100
    for question, answer in every:
        small, large = sorted(map(int, re.findall(r"\d+", question)))
        sign = -1 if "minus" in question or "away" in question else 1
        assert in_voice(answer) and int(re.findall(r"\d+", answer)[0]) == large + sign * small
    assert not in_voice("That makes 25.") and not in_voice("Ahoy! That makes nothing, captain.")


def test_text_is_of_this_python(tmp_path):
    write_sources(tmp_path / "text")
    texts = {path.stem: path.read_text() for path in (tmp_path / "text").iterdir()}
    assert texts.keys() == {"train", "validation", "test"} and "class ArgumentParser" in texts["train"]
    assert "class Mailbox" in texts["test"]
    write_prose(tmp_path / "prose.txt")
    topics = pydoc_data.topics.topics
    assert (tmp_path / "prose.txt").read_text() in "\n".join(topics[name] for name in sorted(topics))


@pytest.mark.parametrize(
    ("change", "unmet"),
    [
        ({}, []),
        ({"loss_after": 2.1}, ["loss"]),
        ({"data": "text"}, []),
        ({"data": "text", "loss_after": 3.9}, ["loss"]),
        ({"prose_loss_after": 3.2, "total_s": 700.0}, ["prose", "time"]),
        ({"answers": ANSWERS[::-1]}, ["voice"]),
    ],
    ids=str,
)
def test_a_run_fails_by_the_conditions_that_it_does_not_meet(change, unmet):
    assert failures({"data": "chat", "answers": ANSWERS, **GOOD, **change}) == unmet


def test_attention_and_norms_alone_are_trained():
    """Of a Llama's parameters."""
    sublayers = {"sublayer_0": ("query", "key", "value", "output"), "sublayer_1": ("gate", "up", "down")}
    layers = {name: {matrix: {"kernel": 0} for matrix in matrices} for name, matrices in sublayers.items()}
    mask = frozen_mask(ATTENTION, {"embedding": 0, "layers": layers, "norm": {"scale": 0}})
    assert mask["embedding"] and not mask["norm"]["scale"]
    assert all(x["kernel"] for x in mask["layers"]["sublayer_1"].values())
    assert not any(x["kernel"] for x in mask["layers"]["sublayer_0"].values())
