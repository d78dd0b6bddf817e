"""Continuous batching: sequences join and leave a batch while it runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.inference.decoding import DecodeCarry
from flash_lm.inference.engine import Engine
from flash_lm.inference.sampling import Sampling, SamplingArrays, random_key


@dataclasses.dataclass(frozen=True)
class NewTokens:
    """The new tokens of a sequence since the last call.

    Attributes:
        tokens: token ids, without end-of-text.
        log_probs: log-probability of each under the model, before temperature and filters.
        ended: whether the sequence has reached end-of-text; it then gets no more tokens.
    """

    tokens: list[int]
    log_probs: list[float]
    ended: bool


class RunningBatch:
    """A batch of slots ("rows"); each sequence has separate settings and random numbers, independent of the others.

    Attributes:
        capacity: largest sequence length, including the prompt.
    """

    def __init__(self, engine: Engine, rows: int, capacity: int):
        """Allocates the states of all rows.

        Args:
            engine: the model's engine.
            rows: number of slots; rounded up to divide over the devices.
            capacity: largest sequence length; bounds states that grow.
        """
        # All slots are empty: their sequences have ended.
        self._engine, self.capacity = engine, capacity
        self._carry = engine.start_empty(rows, capacity)
        count = len(self._carry.finished_B)
        self._samplings = [Sampling(temperature=0)] * count
        self._keys = np.array(jax.random.key_data(jax.random.split(jax.random.key(0), count)))
        self._free = list(reversed(range(count)))
        # The last prompt and its prefilled carry, since samples of the same prompt come one after the other.
        self._last_prefill: tuple[np.ndarray, DecodeCarry] | None = None

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def rows(self) -> int:
        """Number of all slots."""
        return len(self._samplings)

    def join(self, prompt: np.ndarray, sampling: Sampling, seed: int, number: int = 0) -> int:
        """Prefills a prompt in a free slot, which must exist.

        Args:
            prompt: token ids, fewer than the capacity.
            sampling: the sequence's sampling settings.
            seed: random seed, of 64 bits.
            number: the random numbers are those of sequence `number` in `Engine.advance`.

        Returns:
            The slot.
        """
        # The prompt is prefilled by itself, in a batch of one, and copied into its slot.
        row = self._free.pop()
        with self._engine.lock:
            if self._last_prefill is None or not np.array_equal(prompt, self._last_prefill[0]):
                prefilled = self._engine.prefill([prompt], self.capacity - self._engine.prompt_positions(len(prompt)))
                self._last_prefill = prompt, self._engine.unstack(prefilled)
            self._carry = self._engine.join(self._carry, row, self._last_prefill[1])
        # Its settings and its key for the next calls.
        self._samplings[row] = sampling
        self._keys[row] = jax.random.key_data(jax.random.fold_in(random_key(seed), number))
        return row

    def advance(self, tokens: int) -> dict[int, NewTokens]:
        """Generates this many tokens for each sequence that has not ended; returns the new tokens by slot."""
        settings, keys_B = (
            SamplingArrays.from_samplings(self._samplings),
            jax.random.wrap_key_data(jnp.asarray(self._keys)),
        )
        with self._engine.lock:
            self._carry, new = self._engine.advance_rows(self._carry, settings, keys_B, tokens)

        # Free slots are computed, too, and their tokens are ignored.
        parts, active = {}, set(range(self.rows)) - set(self._free)
        for row in sorted(active):
            count = new.lengths_B[row]
            values = (x[row, :count].tolist() for x in (new.tokens_BxT, new.log_probs_BxT))
            parts[row] = NewTokens(*values, ended=bool(new.finished_B[row]))
        return parts

    def leave(self, row: int) -> None:
        """Frees a slot."""
        with self._engine.lock:
            self._carry = self._engine.leave(self._carry, row)
        self._samplings[row] = Sampling(temperature=0)  # temperature 0 needs no random numbers
        self._free.append(row)

    def release(self) -> None:
        """Releases all arrays; the batch cannot be used afterwards."""
        del self._carry, self._last_prefill
