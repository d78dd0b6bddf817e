"""A batch whose rows join and leave while it runs (continuous batching)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.inference.decoding import Decoding
from flash_lm.inference.engine import Engine
from flash_lm.inference.sampling import Sampling, SamplingArrays, random_key


@dataclasses.dataclass(frozen=True)
class Part:
    """The new tokens of a row since the last call.

    Attributes:
        tokens: token ids, without end-of-text.
        log_probs: log-probability of each under the model, before temperature and filters.
        ended: whether the row has reached end-of-text; it then gets no more tokens.
    """

    tokens: list[int]
    log_probs: list[float]
    ended: bool


class RunningBatch:
    """The rows of one carry; each has its own settings and draws, and does not depend on the other rows.

    Attributes:
        capacity: most tokens in a row, including the prompt.
    """

    def __init__(self, engine: Engine, rows: int, capacity: int):
        """Allocates the states of all rows.

        Args:
            engine: the model's engine.
            rows: most rows at the same time; rounded up to divide over the devices.
            capacity: most tokens in a row; bounds states that grow.
        """
        self._engine, self.capacity = engine, capacity
        self._carry = engine.vacant(rows, capacity)
        count = len(self._carry.finished_B)
        self._samplings = [Sampling(temperature=0)] * count
        self._keys = np.array(jax.random.key_data(jax.random.split(jax.random.key(0), count)))
        self._free = list(reversed(range(count)))
        # The last prompt and its prefilled carry: samples of the same prompt come one after the other.
        self._last: tuple[np.ndarray, Decoding] | None = None

    @property
    def free(self) -> int:
        """Number of free rows."""
        return len(self._free)

    @property
    def rows(self) -> int:
        """Number of all rows."""
        return len(self._samplings)

    def join(self, prompt: np.ndarray, sampling: Sampling, seed: int, number: int = 0) -> int:
        """Consumes a prompt; there must be a free row.

        Args:
            prompt: token ids, fewer than the capacity.
            sampling: the row's sampling settings.
            seed: random seed, of 64 bits.
            number: the draws are the same as those of `Engine.advance` for its row of this number.

        Returns:
            The row.
        """
        row = self._free.pop()
        with self._engine.turn:
            if self._last is None or not np.array_equal(prompt, self._last[0]):
                prefilled = self._engine.prefill([prompt], self.capacity - self._engine.places(len(prompt)))
                self._last = prompt, self._engine.unstacked(prefilled)
            self._carry = self._engine.join(self._carry, row, self._last[1])
        self._samplings[row] = sampling
        self._keys[row] = jax.random.key_data(jax.random.fold_in(random_key(seed), number))
        return row

    def advance(self, tokens: int) -> dict[int, Part]:
        """Generates this many tokens for each row that has not ended; returns the parts of the taken rows, by row."""
        settings, keys_B = SamplingArrays.of_rows(self._samplings), jax.random.wrap_key_data(jnp.asarray(self._keys))
        with self._engine.turn:
            self._carry, new = self._engine.advance_rows(self._carry, settings, keys_B, tokens)
        parts, taken = {}, set(range(self.rows)) - set(self._free)
        for row in sorted(taken):
            count = new.lengths_B[row]
            found = (x[row, :count].tolist() for x in (new.tokens_BxT, new.log_probs_BxT))
            parts[row] = Part(*found, ended=bool(new.finished_B[row]))
        return parts

    def leave(self, row: int) -> None:
        """Frees a row."""
        with self._engine.turn:
            self._carry = self._engine.leave(self._carry, row)
        self._samplings[row] = Sampling(temperature=0)  # temperature 0 needs no random numbers
        self._free.append(row)

    def release(self) -> None:
        """Releases all arrays; the batch cannot be used afterwards."""
        del self._carry, self._last
