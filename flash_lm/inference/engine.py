"""`Engine`: prefills prompts in parallel, then generates or scores tokens with one compiled loop, for all families.

Compiled shapes depend only on bucketed lengths: other prompts and numbers of tokens compile nothing new.
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
from flash_lm.inference.decoding import DecodeCarry, Hypothesis, Scored, Tokens
from flash_lm.inference.sampling import SamplingArrays, random_key
from flash_lm.inference.settings import BeamSearch
from flash_lm.models.decode_state import DecodeState
from flash_lm.runs.hosts import fetch_array
from flash_lm.training.sharding import BATCH, round_up_rows

PIECE = 512  # tokens of a prompt that are prefilled at a time
_MIN_BUCKET = 16  # tokens; lengths are rounded up to powers of two, to compile few shapes


class Engine:
    """Generates and scores tokens with one set of parameters.

    Attributes:
        limit: largest sequence length, including the prompt; None: any.
        conditioning: how prompts are read: causally, as a bidirectional prefix, or by an encoder.
        lock: a lock for threads that share the engine, held during calls: programs on several devices must be started
            in one order on all of them.
        grows: whether the state grows with its capacity.
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
            mesh: the batch is sharded over its data and fsdp axes.
            end: id of end-of-text, which ends a sequence.
            allowed_V: which ids may be generated.
            conditioning: how prompts are read.
            begin: id of begin-of-text, the first token of a sequence whose prompt is a source.

        Raises:
            InputError: the model cannot decode.
        """
        # Limits of the model, and the functions that compile on first use.
        model = params.model
        model.abstract.check_decodable()
        self._params, self._mesh = params, mesh
        self._begin, self._max_source_length = begin, model.config.max_length
        self.conditioning = conditioning
        self.limit = model.abstract.longest
        self.lock = threading.RLock() if mesh.size > 1 else contextlib.nullcontext()
        self.grows = model.abstract.state_grows
        self._loop = DecodeLoop(params, mesh, end=end, never_V=~allowed_V, conditioning=conditioning)

    def start(self, rows: int, tokens: int) -> DecodeCarry:
        """The carry before the first token, for this many sequences of at most this many tokens."""
        return self._start_padded(rows, rows, tokens)

    def start_empty(self, rows: int, tokens: int) -> DecodeCarry:
        """A carry whose sequences have all ended, padded to divide over the devices; others may `join` it."""
        return self.unstack(self._start_padded(0, rows, tokens))

    def _start_padded(self, active: int, rows: int, tokens: int) -> DecodeCarry:
        """The carry before the first token; only the first `active` sequences of the padded batch have not ended."""
        with jax.set_mesh(self._mesh):
            padded_rows = round_up_rows(rows, self._mesh)
            return self._loop.start(self._params.unstacked, jnp.int32(active), padded_rows, self._capacity(tokens))

    def state_bytes(self, rows: int, tokens: int) -> int:
        """Bytes of decode state for this many sequences of at most this many tokens."""
        with jax.set_mesh(self._mesh):
            start = lambda params: self._loop.start(params, jnp.int32(rows), rows, self._capacity(tokens))
            shapes = jax.eval_shape(start, self._params.unstacked).state
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

    def prefill(self, prompts: list[np.ndarray], max_tokens: int) -> DecodeCarry:
        """Runs the prompts through the model in pieces of at most `PIECE` tokens; returns the carry for `advance`.

        Args:
            prompts: token ids, at least one each, of any lengths.
            max_tokens: largest number of tokens to generate after them, 0 or more; bounds states that grow.
        """
        # The state has room for the longest prompt and the new tokens; sources are encoded into it.
        longest = max(self.prompt_positions(len(prompt)) for prompt in prompts)
        carry = self.start(len(prompts), longest + max_tokens)
        carry = dataclasses.replace(carry, state=self._encode_sources(carry.state, prompts))
        # Then the prompts, piece by piece; a bidirectional prefix must fit into one piece.
        size = self._prefix_piece(longest)
        with jax.set_mesh(self._mesh):
            for inputs_BxL, lengths_B in self._pieces([self._row_start(prompt) for prompt in prompts], size):
                carry = self._loop.prefill(self._params.unstacked, carry, inputs_BxL, lengths_B)
        return carry

    def prompt_positions(self, prompt: int) -> int:
        """Number of decoder positions of a prompt of this many tokens; a source takes only that of begin-of-text."""
        return len(self._row_start(np.arange(prompt)))

    def longest_prompt(self, capacity: int) -> int:
        """Largest prompt, in tokens, in a sequence of `capacity` tokens of which at least one is generated."""
        most = self.conditioning.max_prompt_length(capacity - 1, self._max_source_length)
        assert most is not None
        return most

    def unstack(self, carry: DecodeCarry) -> DecodeCarry:
        """Unstacks the layers' states into separate arrays for the decode loop; `advance` does this if necessary.

        Args:
            carry: donated.
        """
        if isinstance(carry.state.layers, list):
            return carry
        with jax.set_mesh(self._mesh):
            unstacked_carry = self._loop.unstack(carry)
        # JAX cannot donate arrays to outputs of other shapes, so the stacked ones are freed by hand.
        jax.tree.map(lambda x: x.delete(), carry.state.layers)
        return unstacked_carry

    def advance(
        self, carry: DecodeCarry, settings: SamplingArrays, seed: int, max_tokens: int
    ) -> tuple[DecodeCarry, Tokens]:
        """Generates max_tokens tokens per sequence, or fewer if all sequences end before.

        Token i of sequence b is drawn with the key fold_in(fold_in(seed, b), i), no matter how the calls are split.

        Args:
            carry: from `prefill` or `advance`; donated.
            settings: the sampling settings.
            seed: random seed, of 64 bits.
            max_tokens: 1 or more.
        """
        keys_B = self._loop.row_keys(random_key(seed), len(carry.finished_B))
        return self.advance_rows(carry, settings, keys_B, max_tokens)

    def advance_rows(
        self, carry: DecodeCarry, settings: SamplingArrays, keys_B: jax.Array, max_tokens: int
    ) -> tuple[DecodeCarry, Tokens]:
        """`advance` with settings and a random key per sequence; token i is drawn with fold_in(key, i)."""
        # Budgets of the same bucket share a compiled loop, which gets the exact budget as an argument.
        carry = self.unstack(carry)
        with jax.set_mesh(self._mesh):
            arguments = (carry, settings, keys_B, jnp.int32(max_tokens), bucket(max_tokens))
            carry, new = self._loop.advance(self._params.unstacked, *arguments)
        tokens_BxT, log_probs_BxT, lengths_B = (fetch_array(x) for x in new)
        return carry, Tokens(tokens_BxT, log_probs_BxT, lengths_B, fetch_array(carry.finished_B))

    def search(self, prompts: list[np.ndarray], settings: BeamSearch, max_tokens: int) -> list[list[Hypothesis]]:
        """Beam search: the best answers to each prompt, the best first, at most one per beam.

        Args:
            prompts: token ids, see `prefill`.
            settings: number of beams and length penalty.
            max_tokens: largest number of tokens of an answer, 1 or more.

        Raises:
            RunError: the parameters are not finite.
        """
        carry = self.unstack(self.prefill(prompts, max_tokens))
        with jax.set_mesh(self._mesh):
            numbers = jnp.int32(max_tokens), jnp.float32(settings.length_penalty)
            arguments = (carry, *numbers, settings.beams, bucket(max_tokens))
            result = self._loop.search(self._params.unstacked, *arguments)
        tokens_BxWxT, log_probs_BxWxT, lengths_BxW, scores_BxW, finished_BxW = (fetch_array(x) for x in result)

        # Scores of −∞ mark answers that do not exist; a prompt without any answer had logits of NaN.
        def hypothesis(b: int, w: int) -> Hypothesis:
            ids, log_probs = (x[b, w, : lengths_BxW[b, w]].tolist() for x in (tokens_BxWxT, log_probs_BxWxT))
            return Hypothesis(ids, log_probs, float(scores_BxW[b, w]), bool(finished_BxW[b, w]))

        counts_B = np.isfinite(scores_BxW).sum(axis=1)
        if not counts_B[: len(prompts)].all():
            raise RunError("the model's logits are not finite: use an earlier checkpoint, or train it again")
        return [[hypothesis(b, w) for w in range(counts_B[b])] for b in range(len(prompts))]

    def join(self, carry: DecodeCarry, row: int, other: DecodeCarry) -> DecodeCarry:
        """Continuous batching: puts the first sequence of another carry of the same capacity into a free slot.

        Args:
            carry: from `start_empty` and the calls after it; donated: its buffers are reused.
            row: batch index of a slot whose sequence has ended.
            other: from `prefill`, then `unstack`.
        """
        with jax.set_mesh(self._mesh):
            return self._loop.join(carry, jnp.int32(row), other)

    def leave(self, carry: DecodeCarry, row: int) -> DecodeCarry:
        """Continuous batching: marks a slot as finished; `carry` is donated."""
        with jax.set_mesh(self._mesh):
            return self._loop.leave(carry, jnp.int32(row))

    def score(self, prompts: Sequence[np.ndarray], continuations: Sequence[np.ndarray]) -> list[Scored]:
        """Scores the tokens of each continuation, after its prompt."""
        # The full sequence is scored, and the scores of the prompt are dropped.
        before = [self._row_start(prompt) for prompt in prompts]
        rows = [np.concatenate(pair) for pair in zip(before, continuations, strict=True)]
        scored = self._score_rows(rows, prompts=prompts)
        return [Scored(*(x[len(p) - 1 :] for x in scores)) for p, scores in zip(before, scored, strict=True)]

    def score_rows(
        self, rows: Sequence[np.ndarray], top: int = 0, size: int | None = None, capacity: int | None = None
    ) -> list[Scored]:
        """Scores the tokens of each sequence after its first one.

        Args:
            rows: token ids, at least two per sequence.
            top: K, number of likeliest tokens to return.
            size: number of tokens per piece; None: bucketed lengths, at most `PIECE`.
            capacity: capacity of states that grow, in tokens; None: the longest sequence.

        Raises:
            InputError: the model does not read its prompt from left to right.
        """
        if not self.conditioning.scores_full_text:
            raise InputError("a model with a prefix or a source scores what follows a prompt, not a complete text")
        return self._score_rows(rows, top, size, capacity)

    def _score_rows(
        self,
        rows: Sequence[np.ndarray],
        top: int = 0,
        size: int | None = None,
        capacity: int | None = None,
        prompts: Sequence[np.ndarray] = (),
    ) -> list[Scored]:
        """`score_rows` for sequences that begin with these prompts."""
        # The state before the first token, with the sources in it.
        prefix_B = self._prefixes(prompts)
        state, scored = self.start(len(rows), capacity or max(len(row) for row in rows)).state, []
        state = self._encode_sources(state, prompts)

        # Inputs are all tokens but the last, targets all but the first; both are cut into the same pieces.
        with jax.set_mesh(self._mesh):
            size = size or self._prefix_piece(max(map(len, prompts), default=0))
            pieces = (self._pieces(tokens, size) for tokens in ([row[:-1] for row in rows], [row[1:] for row in rows]))
            for (inputs_BxL, lengths_B), (targets_BxL, _) in zip(*pieces, strict=True):
                piece_scores, state = self._loop.score(
                    self._params.unstacked, state, inputs_BxL, targets_BxL, lengths_B, top, prefix_B
                )
                scored.append([fetch_array(x) for x in piece_scores])

        # Join the pieces, and cut off the padding of each sequence.
        arrays = [np.concatenate(x, axis=1) for x in zip(*scored, strict=True)]
        return [Scored(*(x[b, : len(row) - 1] for x in arrays)) for b, row in enumerate(rows)]

    def _prefix_piece(self, prefix: int) -> int | None:
        """Piece size that holds a full bidirectional prefix, whose tokens see each other; None: the usual size."""
        return bucket(prefix) if self.conditioning.prefix_length(prefix) is not None and prefix > PIECE else None

    def _prefixes(self, prompts: Sequence[np.ndarray]) -> jax.Array | None:
        """Number of tokens with bidirectional attention per sequence, B; None: all are causal."""
        prefix_lengths = self.conditioning.prefix_length(np.array([len(prompt) for prompt in prompts], np.int32))
        if prefix_lengths is None or not prompts:
            return None
        prefix_B = np.zeros(round_up_rows(len(prompts), self._mesh), np.int32)
        prefix_B[: len(prompts)] = prefix_lengths
        return jax.device_put(prefix_B, NamedSharding(self._mesh, BATCH))

    def _row_start(self, prompt: np.ndarray) -> np.ndarray:
        """The first tokens of a decoded sequence with this prompt."""
        return self.conditioning.row_start(prompt, np.array([self._begin], np.int32))

    def _encode_sources(self, state: DecodeState, prompts: Sequence[np.ndarray]) -> DecodeState:
        """Encodes the sources, if the model has an encoder, and adds their keys and values to the donated state."""
        sources = self.conditioning.sources(prompts)
        if sources is None:
            return state
        if (longest := max(map(len, sources))) > self._max_source_length:
            raise InputError(f"a source of {longest} tokens is longer than model.max_length={self._max_source_length}")
        with jax.set_mesh(self._mesh):
            ((source_BxM, lengths_B),) = self._pieces(sources, min(bucket(longest), self._max_source_length))
            return self._loop.encode_source(self._params.unstacked, state, source_BxM, lengths_B)

    def _capacity(self, tokens: int) -> int:
        """The capacity in tokens; 1 if the state does not grow, so that a longer sequence compiles nothing new."""
        return min(bucket(tokens), self.limit or bucket(tokens)) if self.grows else 1

    def _pieces(
        self, rows: Sequence[np.ndarray], fixed_size: int | None = None
    ) -> Iterator[tuple[jax.Array, jax.Array]]:
        """Yields pieces of the sequences, B×L padded on the right, and the number of tokens of each in the piece."""
        longest, start = max(len(row) for row in rows), 0
        sharding = NamedSharding(self._mesh, BATCH)
        # Pieces of `PIECE` tokens; the last one is only as long as its bucket.
        while start < longest:
            size = fixed_size or min(PIECE, bucket(longest - start))
            inputs_BxL = np.zeros((round_up_rows(len(rows), self._mesh), size), np.int32)
            lengths_B = np.zeros(len(inputs_BxL), np.int32)
            for b, row in enumerate(rows):
                piece = row[start : start + size]
                inputs_BxL[b, : len(piece)], lengths_B[b] = piece, len(piece)
            yield jax.device_put(inputs_BxL, sharding), jax.device_put(lengths_B, sharding)
            start += size


def bucket(n: int) -> int:
    """The next power of two, at least 16: all n of the same bucket share one compiled program.

    >>> bucket(3), bucket(16), bucket(17)
    (16, 16, 32)
    """
    return max(_MIN_BUCKET, 1 << (int(n) - 1).bit_length())
