"""Answers to all first texts of a split, and how near they come to the second ones: BLEU, chrF, and how many are equal.

BLEU is that of Papineni et al. 2002 and chrF that of Popović 2015, as sacrebleu computes them; its signatures say how.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from flash_lm.data.examples import ExampleCorpus, Examples
from flash_lm.data.pairs import TextPairs
from flash_lm.data.splits import Splits
from flash_lm.errors import InputError
from flash_lm.inference.engine import Engine
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.settings import BeamSearch

_ROWS = 128  # with a beam each, that are on the device at a time


@dataclasses.dataclass(frozen=True)
class Translation:
    """A pair of the split, and the model's answer to its first text; all as the tokenizer gives them back."""

    first: str
    second: str
    answer: str


class _Asked(NamedTuple):
    """A prompt, the second text without its begin-of-text, and its number in the split."""

    prompt: np.ndarray
    second: np.ndarray
    number: int


def translate(
    trained: TrainedModel,
    corpus: Splits,
    split: str,
    settings: BeamSearch,
    *,
    first: int | None = None,
    max_tokens: int | None = None,
) -> list[Translation]:
    """Answers the first texts of a split, with the best answer of a beam search.

    Where second texts end in end-of-text, an answer ends by itself; where they do not, as those of couplets, it is as
    long as the second text. Texts that are too long are cut as in training; second texts are whole.

    Args:
        trained: a model that was trained on pairs.
        corpus: the pairs.
        split: a name of `corpus.splits`.
        settings: the number of beams, 1 for greedy decoding, and what they are ranked by.
        first: only so many pairs; None: all.
        max_tokens: most tokens of an answer that ends; None: as many as a row of training has.

    Raises:
        InputError: these are no pairs, or the model does not write.
    """
    if not trained.task.answers.continues:
        raise InputError(f"{trained.name} was trained with task={trained.config.task}, and does not write texts")
    if not isinstance(corpus, ExampleCorpus):
        raise _no_pairs()
    pairs, length, end = corpus.splits[split], trained.config.data.length, trained.tokenizer.end
    asked = [_asked(pairs, number, length, trained) for number in range(min(len(pairs), first or len(pairs)))]
    ends = isinstance(pairs, TextPairs)
    if max_tokens and not ends:
        raise InputError(
            f"max_tokens={max_tokens}: an answer of {corpus.name} is as long as its second text; leave it out"
        )
    allowed_V = trained.text_ids()
    allowed_V[end] = ends
    engine = Engine(trained.decode_params, trained.mesh, end=end, allowed_V=allowed_V, **trained.asking)

    def most(one: _Asked) -> int:
        """Of the tokens of an answer."""
        if not ends:
            return len(one.second)
        after = max_tokens or length
        return after if engine.limit is None else min(after, engine.limit - engine.places(len(one.prompt)))

    answers: list[str] = [""] * len(asked)
    rows = min(max(1, _ROWS // settings.beams), len(asked))
    for batch in _batches(asked, most, rows):
        prompts = [one.prompt for one in batch]
        prompts += prompts[:1] * (rows - len(batch))  # other numbers of rows would be compiled, too
        found = engine.search(prompts, settings, most(batch[0]))
        for one, (best, *_) in zip(batch, found, strict=False):
            answers[one.number] = trained.text_of(best.tokens)
    text = trained.text_of
    return [Translation(text(one.prompt), text(one.second), answers[one.number]) for one in asked]


def scores_of(translations: list[Translation], tokenize: str) -> dict[str, Any]:
    """BLEU and chrF of the answers (0 to 100), the share that equals the second text, and sacrebleu's signatures.

    Args:
        translations: at least one.
        tokenize: how BLEU cuts texts into words.
    """
    answers, seconds = [one.answer for one in translations], [[one.second for one in translations]]
    bleu, chrf = BLEU(tokenize=tokenize), CHRF()
    return {
        "pairs": len(translations),
        "bleu": bleu.corpus_score(answers, seconds).score,
        "chrf": chrf.corpus_score(answers, seconds).score,
        "exact": sum(one.answer == one.second for one in translations) / len(translations),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def _asked(pairs: Examples, number: int, length: int, trained: TrainedModel) -> _Asked:
    """A pair as a model with rows of `length` tokens is asked."""
    ids, given, targets, _ = pairs.example(number, trained.conditioning.max_example_length(length))
    if targets is not None or given < 2 or ids[given - 1] != trained.tokenizer.begin:
        raise _no_pairs()
    prompt, second = trained.conditioning.make_prompt(ids[:given]), ids[given:]
    if isinstance(pairs, TextPairs):  # whose example may be cut
        whole, (_, *second) = pairs.pair(number)
        prompt = trained.conditioning.cut_prompt(whole, prompt, length)
    return _Asked(prompt, np.asarray(second, np.int32), number)


def _batches(asked: list[_Asked], most: Callable[[_Asked], int], rows: int) -> Iterator[list[_Asked]]:
    """So many prompts of about the same length, whose answers may have equally many tokens."""
    in_order = sorted(asked, key=lambda one: (most(one), len(one.prompt)))
    for _, group in itertools.groupby(in_order, key=most):
        alike = list(group)
        yield from (alike[i : i + rows] for i in range(0, len(alike), rows))


def _no_pairs() -> InputError:
    return InputError(
        "translations are of pairs of texts: use couplets, copy, or hf with data.pair_column, and data.pack=examples"
    )
