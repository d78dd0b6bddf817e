"""The services of each kind of model: text and couplets with the running batch, masks and labels in request batches."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Literal

from flash_lm.data.tokenizer import MASK
from flash_lm.errors import InputError
from flash_lm.inference.classify import TextClassifier, TextRow
from flash_lm.inference.couplets import CoupletWriter
from flash_lm.inference.fill_in import MASKS, FilledIn, Filler
from flash_lm.inference.generation import Generator, TextDecoder
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.service.completion_format import MOST_TOP
from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.metrics import Metrics
from flash_lm.inference.service.request_batcher import RequestBatcher
from flash_lm.inference.service.requests import (
    MOST_CANDIDATES,
    Candidate,
    FillInAnswer,
    FillInAsked,
    LabelAnswer,
    LabelAsked,
    LabelFound,
    SecondLine,
    SecondLinesAnswer,
    SecondLinesAsked,
    TextAnswer,
    TextAsked,
    TextPiece,
)
from flash_lm.inference.service.running_rows import WAITING, RunningRows, most_tokens
from flash_lm.inference.service.scheduler import Row
from flash_lm.inference.service.several_hosts import CallsOnAllHosts
from flash_lm.inference.settings import draw_seed
from flash_lm.inference.token_scores import TokenScore, TokenScorer

_SCORED_ROWS = 4  # batch size of scoring: each text has a state and logits in addition to those of the running batch
_CANDIDATES_A_MASK = 10  # for a request with the largest number of masks
_DELAY_A_MASK = 0.01  # seconds that smaller requests may overtake: large requests wait, not small ones


class _RowService:
    """Base class of the services that use the running batch."""

    rows: RunningRows

    @property
    def calls_on_all_hosts(self) -> CallsOnAllHosts | None:
        """The calls that all hosts make; None: only one host."""
        return self.rows.calls_on_all_hosts

    def close(self) -> None:
        """Finishes the current sequences."""
        self.rows.close()


class TextService(_RowService):
    """Continues prompts."""

    kind: Literal["text"] = "text"

    def __init__(self, trained: TrainedModel, limits: Limits, metrics: Metrics):
        """Raises InputError: the model cannot continue text."""
        # Generation, and scoring if the model reads texts from left to right.
        self._trained, self._generator, self._limits = trained, Generator(trained), limits
        engine, top = self._generator.engine, min(MOST_TOP, trained.config.model.vocab_size)
        rows = min(_SCORED_ROWS, limits.rows)
        scores_text = engine.conditioning.scores_full_text
        scorer = TokenScorer(engine, rows, most_tokens(engine, limits), top) if scores_text else None
        self.rows = RunningRows(engine, limits, metrics, **({"score": scorer} if scorer else {}))
        self.state_bytes = self.rows.state_bytes
        if scorer is None:
            return
        scorer.compile()  # while the running batch is in memory, so that memory is known to suffice for both
        call = self.rows.calls_on_all_hosts or CallsOnAllHosts(score=scorer)
        self._score_batcher = RequestBatcher(
            lambda batch: call("score", batch), limits, fit=lambda batch: len(batch) <= rows
        )
        metrics.watch("waiting_scores", "Texts waiting to be scored", lambda: self._score_batcher.waiting)

    def check(self, asked: TextAsked) -> Row:
        """Makes the sequence of a request; raises InputError if it is refused, and as `Scheduler.check` does."""
        self._limits.check_text("a prompt", asked.prompt, self._trained)
        (prompt,) = self._generator.check([asked.prompt], asked.max_tokens or 1)
        seed = draw_seed(asked.seed)
        row = Row(prompt, asked.sampling(), seed, 0, self.new_tokens(len(prompt), asked.max_tokens))
        self.rows.scheduler.check([row])  # once the stream has started, it is too late for an error status
        return row

    def new_tokens(self, prompt: int, max_tokens: int | None) -> int:
        """Largest number of new tokens after a prompt.

        Args:
            prompt: number of its tokens.
            max_tokens: number that the client asks for; None: as many as the limits allow.

        Raises:
            InputError: prompt or answer are over a limit.
        """
        # First the limits of the service, then the positions of the model.
        limit, most = self._generator.engine.limit, self._limits.new_tokens
        self._limits.check("a prompt", prompt, self._limits.prompt_tokens)
        self._limits.check_new(max_tokens or 0)
        self._generator.check_length(prompt, 1 if max_tokens is None else max_tokens)
        if max_tokens is not None:
            return max_tokens
        return most if limit is None else min(most, limit - self._generator.engine.prompt_positions(prompt))

    async def score(self, rows: Sequence[Sequence[int]]) -> list[list[TokenScore]]:
        """Scores texts, see `TokenScorer`; raises as `RequestBatcher` does."""
        # Each text is a separate request, so that texts of several clients share a batch.
        tasks = [asyncio.ensure_future(self._score_batcher(list(row))) for row in rows]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:  # if one was refused, nobody waits for the others
                task.cancel()

    async def stream(self, row: Row) -> AsyncIterator[TextPiece | TextAnswer]:
        """Yields pieces of text as they are generated, then the complete answer."""
        decoder, texts, tokens, start = TextDecoder(self._trained.tokenizer), [], 0, time.perf_counter()
        speed = lambda: {"tokens": tokens, "tokens_per_second": tokens / (time.perf_counter() - start)}
        async for _, part in self.rows.parts([row]):
            tokens += len(part.tokens)
            texts.append(decoder(part.tokens) + (decoder.close() if part.ended else ""))
            yield TextPiece(text=texts[-1], state_bytes=self.state_bytes, **speed())
        why, seconds = "end" if row.ended_by_model else "length", time.perf_counter() - start
        yield TextAnswer(text="".join(texts), finish_reason=why, seconds=seconds, **speed())


class CoupletService(_RowService):
    """Writes second lines for first lines."""

    kind: Literal["couplets"] = "couplets"

    def __init__(self, trained: TrainedModel, limits: Limits, metrics: Metrics):
        """Raises InputError: the model was not trained on couplets."""
        self._trained, self._writer, self._limits = trained, CoupletWriter(trained), limits
        self.rows = RunningRows(self._writer.engine, limits, metrics)
        self.state_bytes = self.rows.state_bytes

    def check(self, asked: SecondLinesAsked) -> list[Row]:
        """Makes the sequences of a request; raises InputError if it is refused."""
        # A second line is as long as the first, so a first line is also limited as an answer.
        self._limits.check_text("a first line", asked.first, self._trained)
        prompt, length = self._writer.question(asked.first)
        self._limits.check("a first line", len(prompt), self._limits.prompt_tokens)
        self._limits.check("a first line, and so a second one", length, self._limits.new_tokens)
        self._limits.check_all([len(prompt) + length] * asked.candidates)
        seed = draw_seed(asked.seed)
        return [Row(prompt, asked.sampling(), seed, i, length) for i in range(asked.candidates)]

    async def answer(self, first: str, rows: list[Row]) -> SecondLinesAnswer:
        """Returns all candidates, ranked."""
        # Collect the tokens of all candidates, then rank them.
        start = time.perf_counter()
        tokens, log_probs = [[] for _ in rows], [[] for _ in rows]
        async for number, part in self.rows.parts(rows):
            tokens[number] += part.tokens
            log_probs[number] += part.log_probs
        ranked = self._writer.rank(first, tokens, log_probs)
        candidates = [SecondLine(text=line.text, log_prob=line.log_prob) for line in ranked]
        return SecondLinesAnswer(first=first, candidates=candidates, seconds=time.perf_counter() - start)


class FillInService:
    """Fills in masks."""

    kind: Literal["fill_in"] = "fill_in"
    state_bytes = 0  # no state is kept between tokens

    def __init__(self, trained: TrainedModel, limits: Limits, metrics: Metrics):
        """Raises InputError: the model is causal, or would be compiled for each length of a prompt."""
        self._trained, self._filler, self._limits = trained, Filler(trained), limits
        if self._filler.exact:
            raise InputError(
                f"{trained.name} has model.normalizer={trained.config.model.normalizer}, which compiles again for "
                f"each prompt length while other requests wait: use flash-lm generate"
            )
        # A batch has at most as many masks as the device computes at a time; many masks may be overtaken.
        self._filler.compile(limits.max_prompt_tokens(trained), MOST_CANDIDATES)
        self.calls_on_all_hosts = CallsOnAllHosts(fill=self._filler.fill)
        few = lambda batch: sum(map(_masks, batch)) <= MASKS
        self._batcher = RequestBatcher(self._fill, limits, lambda asked: _DELAY_A_MASK * _masks(asked), few)
        metrics.watch("waiting_rows", WAITING, lambda: self._batcher.waiting)

    def check(self, asked: FillInAsked) -> None:
        """Raises InputError if a request is over a limit."""
        self._limits.check_text("a prompt", asked.prompt, self._trained)
        if (masks := _masks(asked)) > self._limits.masks:
            raise InputError(f"a prompt of {masks} {MASK}s is over the limit of {self._limits.masks} of this service")
        if masks * asked.candidates > (most := _CANDIDATES_A_MASK * self._limits.masks):
            raise InputError(
                f"{asked.candidates} candidates for each of {masks} {MASK}s are over the limit of {most} in all: "
                f"ask for fewer"
            )
        self._limits.check("a prompt", len(self._filler.encode(asked.prompt)), self._limits.prompt_tokens)

    async def answer(self, asked: FillInAsked) -> FillInAnswer:
        """Returns the most likely tokens of each mask."""
        start = time.perf_counter()
        filled = await self._batcher(asked)
        masks = [[Candidate(text=x.text, probability=x.probability) for x in mask] for mask in filled.masks]
        return FillInAnswer(text=filled.text, masks=masks, seconds=time.perf_counter() - start)

    def _fill(self, batch: list[FillInAsked]) -> list[FilledIn]:
        prompts, counts = ([getattr(asked, key) for asked in batch] for key in ("prompt", "candidates"))
        return self.calls_on_all_hosts("fill", prompts, counts, MOST_CANDIDATES)

    def close(self) -> None:
        """Ends the calls on other hosts; requests on the device wait for their own answers."""
        self.calls_on_all_hosts.close()


def _masks(asked: FillInAsked) -> int:
    return asked.prompt.count(MASK)


class LabelService:
    """Predicts labels of texts, or of pairs of texts."""

    kind: Literal["labels", "label_pairs"]
    state_bytes = 0  # no state is kept between tokens

    def __init__(self, trained: TrainedModel, limits: Limits, metrics: Metrics):
        """Raises InputError: the model does not predict labels of texts."""
        self._trained, self._classifier, self._limits = trained, TextClassifier(trained), limits
        self.kind = "label_pairs" if self._classifier.pairs else "labels"
        self._classifier.compile()
        self.calls_on_all_hosts = CallsOnAllHosts(classify=self._classify)
        self._batcher = RequestBatcher(lambda batch: self.calls_on_all_hosts("classify", batch), limits)
        metrics.watch("waiting_rows", WAITING, lambda: self._batcher.waiting)

    def check(self, asked: LabelAsked) -> TextRow:
        """Tokenises a request; raises InputError if it is refused."""
        texts = [asked.text, *([] if asked.pair is None else [asked.pair])]
        for text in texts:
            self._limits.check_text("a text", text, self._trained)
        return self._classifier.encode(texts)

    async def answer(self, row: TextRow) -> LabelAnswer:
        """Returns the likeliest label, and the probability of each."""
        # Label -> probability, in the order of the model's outputs.
        start = time.perf_counter()
        probabilities = await self._batcher(row.tokens)
        ranked = sorted(probabilities.items(), key=lambda item: -item[1])
        labels = [LabelFound(label=label, probability=probability) for label, probability in ranked]
        seconds = time.perf_counter() - start
        return LabelAnswer(label=labels[0].label, labels=labels, left_out=row.left_out, seconds=seconds)

    def _classify(self, rows: list[list[int]]) -> list[dict[str, float]]:
        return self._classifier(rows)

    def close(self) -> None:
        """Ends the calls on other hosts; requests on the device wait for their own answers."""
        self.calls_on_all_hosts.close()
