"""What a model writes by itself, greedily: continuations of held-out text, and answers to closed questions."""

import re
from collections.abc import Iterator, Sequence

import numpy as np

from benchmarks.pretrained.closed_questions import QUESTIONS
from benchmarks.pretrained.held_out import HeldOut
from flash_lm.inference.engine import Engine
from flash_lm.inference.generation import Generation, Generator
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.settings import Sampling
from flash_lm.runs.jsonl import Line

PROMPT = 64  # tokens, with begin-of-text
FIRST = 16  # new tokens that are compared with the teacher's
NGRAM = 4
ASKED = "Question: {}\nAnswer:"  # the message; small models then answer in a word or a sentence
ANSWER = 12  # tokens of an answer
_SCORED = 4  # rows whose logits exist at the same time
_GREEDY = Sampling(temperature=0)


def measure_generation(
    model: TrainedModel, teacher: TrainedModel, texts: Sequence[HeldOut], prompts: int, tokens: int
) -> Iterator[Line]:
    """One line for each text: agreement with the teacher's continuations, repetition, and the teacher's perplexity."""
    writer = Generator(model)
    reference = writer if teacher is model else Generator(teacher)
    for text in texts:
        rows = [*text.passages(model.tokenizer, prompts, PROMPT - 1)]
        ours = writer.generate(rows, tokens, _GREEDY)
        theirs = ours if teacher is model else reference.generate(rows, tokens, _GREEDY)
        yield {
            "text": text.text,
            "split": text.split,
            "prompts": prompts,
            "new_tokens": tokens,
            f"first_{FIRST}_equal": equal_share([x.tokens for x in ours], [x.tokens for x in theirs], FIRST),
            "repeated_4_grams": repeated_share([x.tokens for x in ours], NGRAM),
            "teacher_repeated_4_grams": repeated_share([x.tokens for x in theirs], NGRAM),
            "perplexity_under_teacher": _perplexity(reference.engine, rows, ours),
            "teacher_perplexity_under_teacher": _perplexity(reference.engine, rows, theirs),
            "ended": sum(x.finish_reason == "end" for x in ours) / prompts,
            "example": ours[0].text,
        }


def measure_questions(model: TrainedModel) -> Line:
    """One line: how many of the closed questions the model answers with the right word, in its chat form.

    Raises:
        InputError: the model has no chat template.
    """
    prompts = [
        model.chat_encoder.prompt([{"role": "user", "content": ASKED.format(question)}]) for question, _ in QUESTIONS
    ]
    answers = Generator(model).generate(prompts, ANSWER, _GREEDY)
    right = [has_word(answer.text, words) for answer, (_, words) in zip(answers, QUESTIONS, strict=True)]
    return {
        "questions": len(QUESTIONS),
        "right": sum(right),
        "asked": ASKED,
        "answer_tokens": ANSWER,
        "answers": [
            {"question": question, "answer": answer.text, "right": is_right}
            for (question, _), answer, is_right in zip(QUESTIONS, answers, right, strict=True)
        ],
    }


def equal_share(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]], first: int) -> float:
    """Share of the first tokens of each of their texts that ours has at the same place.

    >>> equal_share([[1, 2, 9, 4]], [[1, 2, 3, 4, 5]], first=3)
    0.6666666666666666
    """
    # A text of theirs that ends early has fewer tokens to compare, and its end.
    pairs = [(a[:first], b[:first]) for a, b in zip(ours, theirs, strict=True)]
    equal = sum(x == y for a, b in pairs for x, y in zip(a, b, strict=False))
    ended = [(a, b) for a, b in pairs if len(b) < first]
    return (equal + sum(len(a) == len(b) for a, b in ended)) / (sum(len(b) for _, b in pairs) + len(ended))


def repeated_share(texts: Sequence[Sequence[int]], n: int) -> float:
    """Share of the n-grams of tokens that have occurred before in their text; 0 if there is none.

    >>> repeated_share([[1, 2, 1, 2, 1], [3]], n=2)
    0.5
    """
    grams = [[tuple(text[i : i + n]) for i in range(len(text) - n + 1)] for text in texts]
    count = sum(map(len, grams))
    return 1 - sum(len(set(each)) for each in grams) / count if count else 0.0


def has_word(answer: str, words: Sequence[str]) -> bool:
    """Whether an answer has one of these words, in any case and not as a part of another word."""
    return any(re.search(rf"(?<!\w){re.escape(word)}(?!\w)", answer, re.IGNORECASE) for word in words)


def _perplexity(engine: Engine, prompts: Sequence[np.ndarray], texts: Sequence[Generation]) -> float | None:
    """The perplexity of all texts after their prompts; None: they are empty."""
    log_probs = list[np.ndarray]()
    pairs = [(row, np.array(x.tokens, np.int32)) for row, x in zip(prompts, texts, strict=True) if x.tokens]
    for start in range(0, len(pairs), _SCORED):
        rows, after = zip(*pairs[start : start + _SCORED], strict=True)
        log_probs += [scored.log_probs for scored in engine.score(rows, after)]
    return float(np.exp(-np.concatenate(log_probs).mean(dtype=np.float64))) if log_probs else None
