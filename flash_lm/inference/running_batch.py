"""A batch that requests join and leave while it runs."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from flash_lm.inference.engine import Decoding, Engine
from flash_lm.inference.sampling import Sampling, SamplingArrays


@dataclasses.dataclass(frozen=True)
class Part:
    """What a row has got since the last time.

    Attributes:
        tokens: ids, end-of-text left out.
        log_probs: of each under the model, before temperature and filters.
        ended: whether end-of-text came, after which the row gets nothing more.
    """

    tokens: list[int]
    log_probs: list[float]
    ended: bool


class RunningBatch:
    """Rows of one carry; each has settings and draws of its own, and does not depend on who else is there.

    Attributes:
        capacity: tokens that a row may reach, prompt included.
    """

    def __init__(self, engine: Engine, rows: int, capacity: int):
        """Allocates the states of all rows.

        Args:
            engine: of the model.
            rows: that there can be at a time; rounded up to divide over the devices.
            capacity: bounds states that grow.
        """
        self._engine, self.capacity = engine, capacity
        self._carry = engine.vacant(rows, capacity)
        count = len(self._carry.finished_B)
        self._samplings = [Sampling(temperature=0)] * count
        self._keys = np.array(jax.random.key_data(jax.random.split(jax.random.key(0), count)))
        self._free = list(reversed(range(count)))
        # The last prompt, and what it became: samples of the same one come one after the other.
        self._last: tuple[np.ndarray, Decoding] | None = None

    @property
    def free(self) -> int:
        """Rows that nobody has."""
        return len(self._free)

    @property
    def rows(self) -> int:
        """All of them."""
        return len(self._samplings)

    def join(self, prompt: np.ndarray, sampling: Sampling, seed: int, number: int = 0) -> int:
        """Consumes a prompt; there must be a free row.

        Args:
            prompt: ids, fewer than the capacity.
            sampling: of this row.
            seed: of the draws.
            number: the draws are those that `Engine.advance` has for its row of this number.

        Returns:
            The row.
        """
        row = self._free.pop()
        if self._last is None or not np.array_equal(prompt, self._last[0]):
            prefilled = self._engine.prefill([prompt], self.capacity - len(prompt))
            self._last = prompt, self._engine.apart(prefilled)
        self._carry = self._engine.join(self._carry, row, self._last[1])
        self._samplings[row] = sampling
        self._keys[row] = jax.random.key_data(jax.random.fold_in(jax.random.key(seed), number))
        return row

    def advance(self, tokens: int) -> dict[int, Part]:
        """So many tokens for each row that has not ended; by row, for those that somebody has."""
        settings, keys_B = SamplingArrays.of_rows(self._samplings), jax.random.wrap_key_data(jnp.asarray(self._keys))
        self._carry, new = self._engine.advance_rows(self._carry, settings, keys_B, tokens)
        parts, taken = {}, set(range(self.rows)) - set(self._free)
        for row in sorted(taken):
            count = new.lengths_B[row]
            found = (x[row, :count].tolist() for x in (new.tokens_BxT, new.log_probs_BxT))
            parts[row] = Part(*found, ended=bool(new.finished_B[row]))
        return parts

    def leave(self, row: int) -> None:
        """Gives a row back."""
        self._carry = self._engine.leave(self._carry, row)
        self._samplings[row] = Sampling(temperature=0)  # so that it asks for no random numbers
        self._free.append(row)

    def release(self) -> None:
        """Lets go of all arrays; it cannot be used any more."""
        del self._carry, self._last
