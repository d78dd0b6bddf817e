"""Data to fine-tune on that every machine can write: Python's own sources, and chats in a voice of their own."""

import importlib.util
import itertools
import json
import pathlib
import pydoc_data.topics
import random
import re

# Modules of the standard library for training, validation and test, each one file in Python 3.11 to 3.13.
SOURCES = {"train": ("argparse", "difflib", "tarfile"), "validation": ("shelve",), "test": ("mailbox",)}
_HELD_OUT_CHARACTERS = 20_000  # of a text that is only scored
# Wordings of a question with its two numbers -> the sign of the second.
_QUESTIONS = {
    "What is {} plus {}?": 1,
    "Add {} and {}.": 1,
    "I have {} apples and buy {} more. How many do I have?": 1,
    "What is {1} minus {0}?": -1,
    "Take {} away from {}.": -1,
}
ANSWER = "Ahoy! That makes {}, captain."
_IN_VOICE = re.compile(r"Ahoy! That makes (\d+), captain\.")


def write_sources(folder: pathlib.Path) -> None:
    """Writes train.txt, validation.txt and test.txt, with the sources of some modules of the standard library."""
    folder.mkdir(parents=True)
    for split, modules in SOURCES.items():
        origins = [importlib.util.find_spec(name).origin for name in modules]  # type: ignore[union-attr]
        text = "\n".join(pathlib.Path(str(origin)).read_text(encoding="utf-8") for origin in origins)
        (folder / f"{split}.txt").write_text(text[: None if split == "train" else _HELD_OUT_CHARACTERS], "utf-8")


def write_prose(file: pathlib.Path) -> None:
    """Writes English text: the reference of the Python language that pydoc shows."""
    text = "\n".join(topic for _, topic in sorted(pydoc_data.topics.topics.items()))
    file.write_text(text[:_HELD_OUT_CHARACTERS], "utf-8")


def write_chats(folder: pathlib.Path, count: int, seed: int) -> None:
    """Writes train.jsonl, validation.jsonl and test.jsonl, with different sums and differences.

    A tenth is held out for validation, and one for test. All answers are right, and of the form of `ANSWER`.
    """
    folder.mkdir(parents=True)
    numbers = random.Random(seed)
    every = list(itertools.product(_QUESTIONS, range(2, 50), range(50, 100)))
    chats = [_chat(*one) for one in numbers.sample(every, count)]
    held_out = count // 10
    parts = {"validation": chats[:held_out], "test": chats[held_out : 2 * held_out], "train": chats[2 * held_out :]}
    for split, part in parts.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in part), "utf-8")


def _chat(question: str, small: int, large: int) -> dict[str, list[dict[str, str]]]:
    answer = ANSWER.format(large + _QUESTIONS[question] * small)
    return {
        "messages": [
            {"role": "user", "content": question.format(small, large)},
            {"role": "assistant", "content": answer},
        ]
    }


def in_voice(answer: str) -> bool:
    """Whether an answer has the form of `ANSWER`, with any number."""
    return _IN_VOICE.fullmatch(answer.strip()) is not None
