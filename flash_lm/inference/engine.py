"""Decoding of all families: prompts are prefilled in parallel, then one compiled loop generates tokens.

What `decode_loop` compiles depends only on bucketed lengths: other prompts and numbers of tokens compile nothing new.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from flash_lm.data.conditioning import BEFORE, Conditioning
from flash_lm.errors import InputError, RunError
from flash_lm.inference.decode_loop import DecodeLoop
from flash_lm.inference.decode_params import DecodeParams
from flash_lm.inference.decoding import Decoding, Hypothesis, Scored, Tokens
from flash_lm.inference.sampling import SamplingArrays, random_key
from flash_lm.inference.settings import BeamSearch
from flash_lm.models.decode_state import DecodeState
from flash_lm.runs.hosts import fetched
from flash_lm.training.sharding import BATCH, round_up_rows

PIECE = 512  # tokens of a prompt that are prefilled at a time
_SHORTEST = 16  # bucket


class Engine:
    """Generates and scores tokens with one set of parameters.

    Attributes:
        limit: most tokens in a row, including the prompt; None: any number.
        conditioning: how prompts are read; a text scored without a prompt is read from left to right.
        turn: to be held by a thread that shares the engine with others, while it calls: programs on several devices
            must be started in one order on all of them.
        grows: whether the state grows with the tokens that it may hold.
    """

    def __init__(
        self,
        params: DecodeParams,
        mesh: Mesh,
        *,
        end: int,
        allowed_V: np.ndarray,
        conditioning: Conditioning = BEFORE,
        begin: int = 0,
    ):
        """Compiles nothing before the first call.

        Args:
            params: parameters of a causal model, on the mesh; unstacked at the first call.
            mesh: the batch is spread over its data and fsdp axes.
            end: id of end-of-text, which ends a row.
            allowed_V: which ids may be generated.
            conditioning: how prompts are read.
            begin: id of begin-of-text, the first token of a sequence whose prompt is a source.

        Raises:
            InputError: the model cannot decode.
        """
        model = params.model
        model.abstract.check_decodable()
        self._params, self._mesh = params, mesh
        self._begin, self._most_source = begin, model.config.max_length
        self.conditioning = conditioning
        self.limit = model.abstract.longest
        self.turn = threading.RLock() if mesh.size > 1 else contextlib.nullcontext()
        self.grows = model.abstract.state_grows
        self._loop = DecodeLoop(params, mesh, end=end, never_V=~allowed_V, conditioning=conditioning)

    def start(self, rows: int, tokens: int) -> Decoding:
        """The carry before the first token: this many rows, each with room for this many tokens."""
        return self._filled(rows, rows, tokens)

    def vacant(self, rows: int, tokens: int) -> Decoding:
        """A carry of rows that have ended, padded to divide over the devices; others may `join` in their places."""
        return self.unstacked(self._filled(0, rows, tokens))

    def _filled(self, going: int, rows: int, tokens: int) -> Decoding:
        with jax.set_mesh(self._mesh):
            filled = round_up_rows(rows, self._mesh)
            return self._loop.start(self._params.unstacked, jnp.int32(going), filled, self._capacity(tokens))

    def state_bytes(self, rows: int, tokens: int) -> int:
        """Size of the model's state for this many rows with room for this many tokens."""
        with jax.set_mesh(self._mesh):
            start = lambda params: self._loop.start(params, jnp.int32(rows), rows, self._capacity(tokens))
            shapes = jax.eval_shape(start, self._params.unstacked).state
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

    def prefill(self, prompts: list[np.ndarray], max_tokens: int) -> Decoding:
        """Consumes prompts in parallel.

        Args:
            prompts: token ids, at least one each, of any lengths.
            max_tokens: most tokens to generate after them, 0 or more; bounds states that grow.
        """
        longest = max(self.places(len(prompt)) for prompt in prompts)
        carry, size = self.start(len(prompts), longest + max_tokens), self._whole(longest)
        carry = dataclasses.replace(carry, state=self._with_sources(carry.state, prompts))
        with jax.set_mesh(self._mesh):
            for inputs_BxL, lengths_B in self._pieces([self._begun(prompt) for prompt in prompts], size):
                carry = self._loop.prefill(self._params.unstacked, carry, inputs_BxL, lengths_B)
        return carry

    def places(self, prompt: int) -> int:
        """How many places of a row a prompt of so many tokens takes: a source takes none, and the row begins."""
        return len(self._begun(np.arange(prompt)))

    def longest_prompt(self, capacity: int) -> int:
        """Most tokens of a prompt in a row with room for so many tokens, one of them new."""
        most = self.conditioning.max_prompt_length(capacity - 1, self._most_source)
        assert most is not None
        return most

    def unstacked(self, carry: Decoding) -> Decoding:
        """Unstacks the layers' states into separate arrays, as the loop needs them; `advance` does this if necessary.

        Args:
            carry: donated.
        """
        if isinstance(carry.state.layers, list):
            return carry
        with jax.set_mesh(self._mesh):
            unstacked = self._loop.unstack(carry)
        jax.tree.map(lambda x: x.delete(), carry.state.layers)  # JAX cannot donate arrays to outputs of other shapes
        return unstacked

    def advance(self, carry: Decoding, settings: SamplingArrays, seed: int, max_tokens: int) -> tuple[Decoding, Tokens]:
        """Generates max_tokens tokens per row, or fewer if all rows end before.

        Token i of row b is drawn with the key fold_in(fold_in(seed, b), i), no matter how the calls are split.

        Args:
            carry: from `prefill` or `advance`; donated.
            settings: the sampling settings.
            seed: random seed, of 64 bits.
            max_tokens: 1 or more.
        """
        keys_B = self._loop.row_keys(random_key(seed), len(carry.finished_B))
        return self.advance_rows(carry, settings, keys_B, max_tokens)

    def advance_rows(
        self, carry: Decoding, settings: SamplingArrays, keys_B: jax.Array, max_tokens: int
    ) -> tuple[Decoding, Tokens]:
        """As `advance`, with settings and a random key per row; token i of a row is drawn with fold_in(its key, i)."""
        carry = self.unstacked(carry)
        with jax.set_mesh(self._mesh):
            arguments = (carry, settings, keys_B, jnp.int32(max_tokens), bucket(max_tokens))
            carry, new = self._loop.advance(self._params.unstacked, *arguments)
        tokens_BxT, log_probs_BxT, lengths_B = (fetched(x) for x in new)
        return carry, Tokens(tokens_BxT, log_probs_BxT, lengths_B, fetched(carry.finished_B))

    def search(self, prompts: list[np.ndarray], settings: BeamSearch, max_tokens: int) -> list[list[Hypothesis]]:
        """The best answers of a beam search to each prompt, the best first; at most as many as there are beams.

        Args:
            prompts: as for `prefill`.
            settings: the number of beams, and what they are ranked by.
            max_tokens: most tokens of an answer, 1 or more.

        Raises:
            RunError: the parameters are not finite.
        """
        carry = self.unstacked(self.prefill(prompts, max_tokens))
        with jax.set_mesh(self._mesh):
            numbers = jnp.int32(max_tokens), jnp.float32(settings.length_penalty)
            arguments = (carry, *numbers, settings.beams, bucket(max_tokens))
            found = self._loop.search(self._params.unstacked, *arguments)
        tokens_BxWxT, log_probs_BxWxT, lengths_BxW, scores_BxW, finished_BxW = (fetched(x) for x in found)

        def one(b: int, w: int) -> Hypothesis:
            ids, log_probs = (x[b, w, : lengths_BxW[b, w]].tolist() for x in (tokens_BxWxT, log_probs_BxWxT))
            return Hypothesis(ids, log_probs, float(scores_BxW[b, w]), bool(finished_BxW[b, w]))

        exist_B = np.isfinite(scores_BxW).sum(axis=1)
        if not exist_B[: len(prompts)].all():
            raise RunError("the model's logits are not finite: use an earlier checkpoint, or train it again")
        return [[one(b, w) for w in range(exist_B[b])] for b in range(len(prompts))]

    def join(self, carry: Decoding, row: int, other: Decoding) -> Decoding:
        """Replaces a row by the first row of another carry of the same capacity.

        Args:
            carry: from `vacant` and the calls after it; donated.
            row: a row that has ended.
            other: from `prefill`, then `unstacked`.
        """
        with jax.set_mesh(self._mesh):
            return self._loop.join(carry, jnp.int32(row), other)

    def leave(self, carry: Decoding, row: int) -> Decoding:
        """Ends a row; `carry` is donated."""
        with jax.set_mesh(self._mesh):
            return self._loop.leave(carry, jnp.int32(row))

    def score(self, prompts: Sequence[np.ndarray], continuations: Sequence[np.ndarray]) -> list[Scored]:
        """The tokens of each continuation, after its prompt and the tokens before them."""
        before = [self._begun(prompt) for prompt in prompts]
        rows = [np.concatenate(pair) for pair in zip(before, continuations, strict=True)]
        scored = self._scored(rows, prompts=prompts)
        return [Scored(*(x[len(p) - 1 :] for x in one)) for p, one in zip(before, scored, strict=True)]

    def score_rows(
        self, rows: Sequence[np.ndarray], top: int = 0, size: int | None = None, capacity: int | None = None
    ) -> list[Scored]:
        """The tokens of each row after its first, after all before them.

        Args:
            rows: token ids, at least two each.
            top: K.
            size: tokens that the device sees at a time; None: as many as suit the rows.
            capacity: tokens for which states that grow have room; None: the longest row's.

        Raises:
            InputError: the model does not read its prompt from left to right.
        """
        if not self.conditioning.scores_full_text:
            raise InputError("a model with a prefix or a source scores what follows a prompt, not a whole text")
        return self._scored(rows, top, size, capacity)

    def _scored(
        self,
        rows: Sequence[np.ndarray],
        top: int = 0,
        size: int | None = None,
        capacity: int | None = None,
        prompts: Sequence[np.ndarray] = (),
    ) -> list[Scored]:
        """As `score_rows`, for rows with these prompts."""
        prefix_B = self._prefixes(prompts)
        state, scored = self.start(len(rows), capacity or max(len(row) for row in rows)).state, []
        state = self._with_sources(state, prompts)
        with jax.set_mesh(self._mesh):
            size = size or self._whole(max(map(len, prompts), default=0))
            pieces = (self._pieces(part, size) for part in ([row[:-1] for row in rows], [row[1:] for row in rows]))
            for (inputs_BxL, lengths_B), (targets_BxL, _) in zip(*pieces, strict=True):
                found, state = self._loop.score(
                    self._params.unstacked, state, inputs_BxL, targets_BxL, lengths_B, top, prefix_B
                )
                scored.append([fetched(x) for x in found])
        joined = [np.concatenate(x, axis=1) for x in zip(*scored, strict=True)]
        return [Scored(*(x[b, : len(row) - 1] for x in joined)) for b, row in enumerate(rows)]

    def _whole(self, given: int) -> int | None:
        """The size of pieces whose first has all that is given, if it must."""
        return bucket(given) if self.conditioning.prefix_length(given) is not None and given > PIECE else None

    def _prefixes(self, prompts: Sequence[np.ndarray]) -> jax.Array | None:
        """The number of tokens that each row sees both ways; None: none."""
        seen = self.conditioning.prefix_length(np.array([len(prompt) for prompt in prompts], np.int32))
        if seen is None or not prompts:
            return None
        prefix_B = np.zeros(round_up_rows(len(prompts), self._mesh), np.int32)
        prefix_B[: len(prompts)] = seen
        return jax.device_put(prefix_B, NamedSharding(self._mesh, BATCH))

    def _begun(self, prompt: np.ndarray) -> np.ndarray:
        """The first tokens of a row with this prompt."""
        return self.conditioning.row_start(prompt, np.array([self._begin], np.int32))

    def _with_sources(self, state: DecodeState, prompts: Sequence[np.ndarray]) -> DecodeState:
        """The state with what the encoder makes of each row's source, if there is one; then `state` is donated."""
        sources = self.conditioning.sources(prompts)
        if sources is None:
            return state
        if (longest := max(map(len, sources))) > self._most_source:
            raise InputError(f"a source of {longest} tokens is longer than model.max_length={self._most_source}")
        with jax.set_mesh(self._mesh):
            ((source_BxM, lengths_B),) = self._pieces(sources, min(bucket(longest), self._most_source))
            return self._loop.read(self._params.unstacked, state, source_BxM, lengths_B)

    def _capacity(self, tokens: int) -> int:
        """The capacity in tokens; 1 if the state does not grow, so that a longer row compiles nothing new."""
        return min(bucket(tokens), self.limit or bucket(tokens)) if self.grows else 1

    def _pieces(
        self, rows: Sequence[np.ndarray], fixed_size: int | None = None
    ) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Yields the rows piece by piece, padded on the right, and the number of tokens of each row in the piece."""
        longest, start = max(len(row) for row in rows), 0
        spread = NamedSharding(self._mesh, BATCH)
        while start < longest:
            size = fixed_size or min(PIECE, bucket(longest - start))
            inputs_BxL = np.zeros((round_up_rows(len(rows), self._mesh), size), np.int32)
            lengths_B = np.zeros(len(inputs_BxL), np.int32)
            for b, row in enumerate(rows):
                part = row[start : start + size]
                inputs_BxL[b, : len(part)], lengths_B[b] = part, len(part)
            yield jax.device_put(inputs_BxL, spread), jax.device_put(lengths_B, spread)
            start += size


def bucket(n: int) -> int:
    """The next power of two, at least 16: all n of the same bucket share one compiled program."""
    return max(_SHORTEST, 1 << (int(n) - 1).bit_length())
