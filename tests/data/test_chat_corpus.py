"""Chats as a corpus: rows with the answers as targets, and a model that is trained and scored on them."""

import dataclasses
import json
import logging

import numpy as np
import pytest
from chats import CHATML, assistant, chat_tokenizer, spelled, tokenizer_json, user
from inference.test_export import trained_model
from small import small_config

import flash_lm
from flash_lm.config.experiment import parse
from flash_lm.data.examples import ExampleRows
from flash_lm.data.splits import load_splits
from flash_lm.data.token_cache import KnownCorpus
from flash_lm.errors import InputError
from flash_lm.inference.export import export
from flash_lm.inference.scoring import evaluate
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")
CHATS = [[user(f"say {i}"), assistant(f"ä{i}")] for i in range(30)]
CHATS[3] = [{"role": "system", "content": "s"}, user("q"), assistant("one"), user("r"), assistant("two")]


def write(path, chats) -> str:
    lines = (json.dumps({"messages": chat, "id": 7}) for chat in chats)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)


def config(path: str, cache, **keys):
    raw = small_config(path, cache)
    raw.data.update(corpus="chat", path=path, pack="examples", tokenizer="hf", length=64, tokens_per_batch=8 * 64)
    raw.model.max_length = 64
    raw.update_from_flattened_dict(keys)
    return raw


def load(raw, tokenizer=None):
    return load_splits(parse(raw).data, KnownCorpus(tokenizer or chat_tokenizer()))


def predicted(split, length: int = 64) -> list[str]:
    """The texts of the targets of each row."""
    rows = ExampleRows(split, length, 1)
    rows = [rows[i] for i in range(len(rows))]
    for row in rows:  # each target is the next input
        asked, count = np.flatnonzero(row["loss_mask_BxL"]), row["segment_ids_BxL"].sum()
        asked = asked[asked + 1 < count]
        np.testing.assert_array_equal(row["targets_BxL"][asked], row["inputs_BxL"][asked + 1])
    return [spelled(row["targets_BxL"][row["loss_mask_BxL"] > 0]) for row in rows]


def test_the_answers_with_their_ends_are_targets(tmp_path):
    corpus = load(config(write(tmp_path / "chats.jsonl", CHATS), tmp_path))
    every = [predicted(corpus.splits[split]) for split in ("train", "validation", "test")]
    expected = ["".join(one["content"] + "<|im_end|>" for one in chat if one["role"] == "assistant") for chat in CHATS]
    assert sorted(sum(every, [])) == sorted(expected) and [len(texts) for texts in every] == [26, 2, 2]
    assert corpus.tokenizer.fingerprint == chat_tokenizer().fingerprint


def test_equal_chats_are_in_one_split_whatever_their_order(tmp_path):
    path = write(tmp_path / "chats.jsonl", CHATS)
    once = load(config(path, tmp_path))
    write(tmp_path / "chats.jsonl", [*CHATS[::-1], *CHATS])
    twice = load(config(path, tmp_path))
    for split in ("train", "validation", "test"):
        assert sorted(predicted(twice.splits[split])) == sorted(predicted(once.splits[split]) * 2)
    assert once.fingerprint != twice.fingerprint


def test_names_of_files_say_the_splits(tmp_path):
    for name, part in (("train", CHATS[:4]), ("valid", CHATS[4:6]), ("test", CHATS[6:7])):
        write(tmp_path / f"{name}.jsonl", part)
    (tmp_path / "readme.txt").write_text("no chats")
    corpus = load(config(str(tmp_path), tmp_path))
    assert [len(corpus.splits[split]) for split in ("train", "validation", "test")] == [4, 2, 1]


def test_a_long_chat_is_cut_and_one_without_an_answer_in_its_row_is_left_out(tmp_path, caplog):
    long = [[user("q"), assistant("x" * 100)], [user("q" * 100), assistant("x")]]
    for name, part in (("train", [*CHATS[:3], *long]), ("valid", CHATS[:1]), ("test", CHATS[:1])):
        write(tmp_path / f"{name}.jsonl", part)
    with caplog.at_level(logging.INFO, "flash_lm"):
        texts = predicted(load(config(str(tmp_path), tmp_path)).splits["train"])
    assert texts[:3] == [f"ä{i}<|im_end|>" for i in range(3)]
    assert texts[3:] == ["x" * (64 - len("<user\nq>\n<assistant\n") + 1)]
    assert "train: 2 of 5 chats are longer than data.length=64 tokens: 1 are cut, 1 have no answer" in caplog.text


def test_a_run_says_of_how_many_chats_only_the_last_answer_is_learnt(tmp_path, caplog):
    changing = CHATML.replace(
        "message['content']", "message['content'] + ('.' if loop.last and message.role == 'assistant' else '')"
    )
    with caplog.at_level(logging.INFO, "flash_lm"):
        corpus = load(config(write(tmp_path / "chats.jsonl", CHATS), tmp_path), chat_tokenizer(changing))
    texts = sum((predicted(split) for split in corpus.splits.values()), [])
    assert "two.<|im_end|>" in texts and not any("one" in text for text in texts)
    assert caplog.text.count("1 of 30 chats teach their last answer alone") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", 'line 2: a line must be {"messages": '),
        ('{"text": "a"}', 'line 2: a line must be {"messages": '),
        (json.dumps({"messages": []}), "line 2: a chat is a list of messages"),
        (json.dumps({"messages": [user("a")]}), "line 2: no message has the role assistant"),
        (json.dumps({"messages": [user("<|im_end|>"), assistant("a")]}), "line 2: message 1 spells <|im_end|>"),
        (
            json.dumps({"messages": [user("a"), {"role": "assistant", "tool_calls": [1]}]}),
            "line 2: message 2 must have",
        ),
        ("ä".encode("latin-1"), "chats.jsonl is not UTF-8"),
    ],
    ids=lambda x: str(x)[:30],
)
def test_a_bad_line_is_named(tmp_path, line, message):
    path = tmp_path / "chats.jsonl"
    path.write_bytes(
        json.dumps({"messages": CHATS[0]}).encode() + b"\n" + (line if isinstance(line, bytes) else line.encode())
    )
    with pytest.raises(InputError) as error:
        load(config(str(path), tmp_path))
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data.path": None}, "data.corpus=chat needs data.path"),
        ({"data.tokenizer": "bytes"}, "needs the tokenizer of a model with a chat template, not bytes: set data.tok"),
        ({"data.pack": "stream"}, "data.corpus=chat needs data.pack=examples"),
        ({"data.length": 8}, "no chat of the train split has an answer within data.length=8 tokens"),
        ({"data.path": "nowhere/*.jsonl"}, "no file matches data.path=nowhere"),
        ({"data.path": "few.jsonl"}, "has 2 different chats for training, too few to hold out validation and test"),
    ],
    ids=str,
)
def test_keys_that_do_not_fit(keys, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "few.jsonl", CHATS[:2])
    with pytest.raises(InputError, match=message.replace("*", r"\*")):
        load(config(write(tmp_path / "chats.jsonl", CHATS), tmp_path, **keys))


def test_a_tokenizer_without_a_template_is_refused(tmp_path):
    with pytest.raises(InputError, match="the model has no chat template"):
        load(config(write(tmp_path / "chats.jsonl", CHATS), tmp_path), chat_tokenizer(None))


@pytest.mark.slow("trains and scores a run")
def test_a_model_is_trained_and_scored_on_answers(tmp_path):
    """The score is that of the answers' tokens, by the model's logits, and it improves; the template goes along."""
    path = write(tmp_path / "chats.jsonl", CHATS)
    drawn = trained_model(tmp_path / "drawn", "transformer_plus_plus", max_length=64)
    chat = chat_tokenizer()
    facts = drawn.facts | {"tokenizer": chat.fingerprint}
    export(dataclasses.replace(drawn, tokenizer=chat, facts=facts), parent := tmp_path / "parent", "mit")
    about = json.loads((parent / "config.json").read_text())
    about["config"]["data"]["tokenizer"] = "hf"  # as an import writes it
    (parent / "config.json").write_text(json.dumps(about))

    words = [f"--config.data.{key}" for key in ("corpus=chat", f"path={path}", "pack=examples")]
    (before,) = evaluate(parent, "test", [64], overrides=words)
    model, log_probs = flash_lm.load(parent), []
    for answer in predicted(load(config(path, tmp_path)).splits["test"]):
        content = answer.removesuffix("<|im_end|>")
        text = f"<|im_start|>user\nsay {content[1:]}<|im_end|>\n<|im_start|>assistant\n{answer}"
        (ids, _), count = chat_tokenizer().encode_marked([text])[0], len(content.encode()) + 1
        logits = model.logits(ids).astype(np.float64)[-count - 1 : -1]
        each = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        log_probs += [*each[np.arange(count), ids[-count:]]]
    assert before["tokens"] == len(log_probs) and before["loss"] == pytest.approx(-np.mean(log_probs), rel=1e-5)

    keys = {"train.init_from": str(parent), "train.steps": 6, "train.eval_every": 0, "train.checkpoint_every": 0}
    train(config(path, tmp_path / "cache", **keys), tmp_path / "run")
    (after,) = evaluate(tmp_path / "run", "test")
    assert after["corpus"] == "chat" and after["own_corpus"] and after["tokens"] == before["tokens"]
    assert after["loss"] < 0.8 * before["loss"]
    assert flash_lm.load(tmp_path / "run").can_chat


def test_a_tokenizer_may_come_from_a_folder(tmp_path):
    """For a new model, which starts from no other."""
    (tmp_path / "tokenizer.json").write_text(tokenizer_json())
    about = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
    raw = config(write(tmp_path / "chats.jsonl", CHATS), tmp_path, **{"data.tokenizer_path": str(tmp_path)})
    assert load_splits(parse(raw).data).tokenizer.fingerprint == chat_tokenizer().fingerprint
    raw.data.tokenizer_path = None
    with pytest.raises(InputError, match="data.tokenizer=hf needs an existing tokenizer"):
        load_splits(parse(raw).data)
