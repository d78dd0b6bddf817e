"""Translates the first texts of a split, and compares with the second texts: BLEU, chrF, and exact matches.

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

_ROWS = 128  # beams of all prompts on the device


@dataclasses.dataclass(frozen=True)
class Translation:
    """A pair of the split, and the model's answer to its first text, all decoded from tokens."""

    first: str
    second: str
    answer: str


class _Query(NamedTuple):
    """A prompt, the second text without its begin-of-text, and the number of the pair in the split."""

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
    """Translates the first texts of a split with beam search.

    If second texts end in end-of-text, an answer ends by itself; if they do not, as those of couplets, it is as long as
    the second text. First texts that are too long are cut as in training; second texts are not cut.

    Args:
        trained: a model that was trained on pairs.
        corpus: the pairs.
        split: a name of `corpus.splits`.
        settings: number of beams, 1 for greedy decoding, and length penalty.
        first: number of pairs to translate; None: all.
        max_tokens: largest answer in tokens, if answers end by themselves; None: the sequence length of training.

    Raises:
        InputError: the corpus has no pairs, or the model does not generate.
    """
    # The queries; a corpus without end-of-text fixes the length of each answer.
    if not trained.task.answers.continues:
        raise InputError(f"{trained.name} was trained with task={trained.config.task}, and does not write texts")
    if not isinstance(corpus, ExampleCorpus):
        raise _no_pairs()
    pairs, length, end = corpus.splits[split], trained.config.data.length, trained.tokenizer.end
    queries = [_make_query(pairs, number, length, trained) for number in range(min(len(pairs), first or len(pairs)))]
    ends = isinstance(pairs, TextPairs)
    if max_tokens and not ends:
        raise InputError(
            f"max_tokens={max_tokens}: an answer of {corpus.name} is as long as its second text; leave it out"
        )

    # The engine may generate end-of-text only if answers end by themselves.
    allowed_V = trained.text_ids()
    allowed_V[end] = ends
    engine = Engine(trained.decode_params, trained.mesh, end=end, allowed_V=allowed_V, **trained.engine_options)

    def max_answer_tokens(query: _Query) -> int:
        """Largest number of tokens of an answer."""
        if not ends:
            return len(query.second)
        limit = max_tokens or length
        return limit if engine.limit is None else min(limit, engine.limit - engine.prompt_positions(len(query.prompt)))

    # Batches of one size; answers go back to the numbers of their pairs.
    answers: list[str] = [""] * len(queries)
    rows = min(max(1, _ROWS // settings.beams), len(queries))
    for batch in _batches(queries, max_answer_tokens, rows):
        prompts = [query.prompt for query in batch]
        prompts += prompts[:1] * (rows - len(batch))  # another batch size would be compiled anew
        hypotheses = engine.search(prompts, settings, max_answer_tokens(batch[0]))
        for query, (best, *_) in zip(batch, hypotheses, strict=False):
            answers[query.number] = trained.decode_text(best.tokens)
    text = trained.decode_text
    return [Translation(text(query.prompt), text(query.second), answers[query.number]) for query in queries]


def compute_scores(translations: list[Translation], tokenize: str) -> dict[str, Any]:
    """BLEU and chrF of the answers (0 to 100), the share that equals the second text, and sacrebleu's signatures.

    Args:
        translations: at least one.
        tokenize: sacrebleu's name of BLEU's tokenizer.
    """
    answers, seconds = (
        [translation.answer for translation in translations],
        [[translation.second for translation in translations]],
    )
    # The signatures make the scores comparable with others.
    bleu, chrf = BLEU(tokenize=tokenize), CHRF()
    return {
        "pairs": len(translations),
        "bleu": bleu.corpus_score(answers, seconds).score,
        "chrf": chrf.corpus_score(answers, seconds).score,
        "exact": sum(translation.answer == translation.second for translation in translations) / len(translations),
        "bleu_signature": str(bleu.get_signature()),
        "chrf_signature": str(chrf.get_signature()),
    }


def _make_query(pairs: Examples, number: int, length: int, trained: TrainedModel) -> _Query:
    """Makes the query of a pair, for sequence length `length`."""
    ids, prompt_length, targets, _ = pairs.example(number, trained.conditioning.max_example_length(length))
    if targets is not None or prompt_length < 2 or ids[prompt_length - 1] != trained.tokenizer.begin:
        raise _no_pairs()
    prompt, second = trained.conditioning.make_prompt(ids[:prompt_length]), ids[prompt_length:]
    if isinstance(pairs, TextPairs):  # the example may be cut: the second text is read in full
        first, (_, *second) = pairs.pair(number)
        prompt = trained.conditioning.cut_prompt(first, prompt, length)
    return _Query(prompt, np.asarray(second, np.int32), number)


def _batches(queries: list[_Query], max_answer_tokens: Callable[[_Query], int], rows: int) -> Iterator[list[_Query]]:
    """Yields batches of queries with the same limit of their answers, sorted by length."""
    ordered = sorted(queries, key=lambda query: (max_answer_tokens(query), len(query.prompt)))
    for _, group in itertools.groupby(ordered, key=max_answer_tokens):
        group = list(group)
        yield from (group[i : i + rows] for i in range(0, len(group), rows))


def _no_pairs() -> InputError:
    return InputError(
        "translations are of pairs of texts: use couplets, copy, or hf with data.pair_column, and data.pack=examples"
    )
