"""The matrix of the model tests: every family, causal and bidirectional, in one small shape.

Models and their jitted functions are cached for the session, so each is compiled once for all tests.
"""

import dataclasses
import functools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from oracles import families as oracle_families
from oracles.biases import with_biases
from oracles.language_model import language_model

from flash_lm import build_model
from flash_lm.configs.base import get_config
from flash_lm.families.family import FAMILIES

BATCH, LENGTH = 2, 29  # three chunks and five tokens
SHAPE = {
    "num_layers": 2,
    "model_dim": 32,
    "num_heads": 2,
    "max_length": 32,
    "vocab_size": 61,
    "init": "lecun",
    "tie_embeddings": False,  # so the gradient of an embedding is that of an input only
}
for _name, _row in oracle_families.FAMILIES.items():
    assert all(SHAPE.get(key, value) == value for key, value in _row.small.items()), f"{_name}: another family's key"
    SHAPE.update(_row.small)

FORMS = {"causal": True, "bidirectional": False}
CASES = [(family, causal) for family, row in FAMILIES.items() for form, causal in FORMS.items() if form in row.serves]
# The form of each family in tests that need only one.
FORM = {family: "causal" in row.serves for family, row in FAMILIES.items()}
CAUSAL = [family for family, causal in FORM.items() if causal]
CASE_IDS = [f"{family}-{'causal' if causal else 'bidirectional'}" for family, causal in CASES]

# Documents across chunk borders and inside a chunk, padding between them and at the end, a repeated id.
PACKED = np.array([[5] * 10 + [0] * 3 + [5] * 9 + [2] * 4 + [0] * 3, [1] * 17 + [3] * 12], np.int32)
# One document per sequence, for families that do not support packing.
PADDED = np.array([[5] * 22 + [0] * 7, [1] * 29], np.int32)
# Documents that start on chunk borders.
ALIGNED = np.array([[1] * 8 + [2] * 13 + [0] * 3 + [3] * 5, [4] * 21 + [0] * 3 + [4] * 5], np.int32)


def standard_segment_ids(family: str) -> np.ndarray:
    """Segment ids of the standard batch: packed if the family supports it, else padded."""
    return PACKED if "packed" in FAMILIES[family].serves else PADDED


def tokens() -> np.ndarray:
    """Token ids, B×L, all different, so the gradient of an embedding is that of one input."""
    return np.random.default_rng(0).permutation(SHAPE["vocab_size"])[: BATCH * LENGTH].reshape(BATCH, LENGTH)


def targets() -> np.ndarray:
    """Target ids, B×L."""
    return np.random.default_rng(1).integers(SHAPE["vocab_size"], size=(BATCH, LENGTH))


def real_tokens(segment_ids: np.ndarray | None) -> np.ndarray:
    """Mask of the tokens that are not padding, B×L."""
    return np.ones((BATCH, LENGTH), bool) if segment_ids is None else segment_ids > 0


def draw_parameters(shapes: dict, seed: int = 0) -> dict:
    """Draws float32 parameters of order 1, so that no scale of 1, offset of 0 or small bias hides a term.

    A parameter's values depend on its path and shape alone, so models of the same shape share them.
    """

    def draw(path, leaf) -> np.ndarray:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        normal = np.random.default_rng((seed, zlib.crc32(name.encode()))).normal(size=leaf.shape)
        if name.endswith("kernel"):
            normal /= np.sqrt(leaf.shape[-2])
        elif name.endswith("scale"):
            normal = 1 + 0.3 * normal
        elif name.endswith("share"):
            normal = 1 / (1 + np.exp(-normal))
        else:  # embeddings, offsets, biases, positions
            normal *= 0.5
        return normal.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, shapes)


def model_config(family: str, causal: bool, **overrides):
    """Model section of the config in the small shape."""
    config = get_config().model
    config.update_from_flattened_dict({**SHAPE, "family": family, "causal": causal, **overrides})
    return config


class Case:
    """One model with its parameters as a nested dict, its jitted functions and its oracle."""

    def __init__(self, family: str, causal: bool, overrides: dict):
        config = model_config(family, causal, **overrides)
        self.family, self.causal, self.config_dict = family, causal, config
        self.settings = oracle_families.complete(config.to_dict())
        self._build = lambda: build_model(config, rngs=nnx.Rngs(0))
        self.abstract = nnx.eval_shape(self._build)  # the module, with shapes instead of arrays
        self._graph, self._state, _ = nnx.split(self.abstract, nnx.Param, ...)
        self.params = draw_parameters(nnx.to_pure_dict(self._state))
        self.config = self.abstract.config
        self.logits = jax.jit(lambda params, *args: self.model(params)(*args))
        self.prefill = jax.jit(lambda params, *args: self.model(params).prefill(*args))
        self.step = jax.jit(lambda params, *args: self.model(params).step(*args))
        self.loss_and_grads = jax.jit(jax.value_and_grad(self._loss, has_aux=True))

    @functools.cached_property
    def _constants(self):
        """Values of the arrays that are not trained; most families have none."""
        constants = nnx.split(self.abstract, nnx.Param, ...)[2]
        if not jax.tree.leaves(constants):
            return constants
        # The first use may be inside of a jitted function, where a call of another one would not give values.
        return jax.jit(lambda: nnx.split(self._build(), nnx.Param, ...)[2]).lower().compile()()

    def model(self, params: dict):
        """Builds the module with these parameters."""
        state = jax.tree.map(lambda leaf: leaf, self._state)
        nnx.replace_by_pure_dict(state, jax.tree.map(jnp.asarray, params))
        return nnx.merge(self._graph, state, self._constants)

    def init_state(self, batch: int = BATCH, capacity: int | None = None):
        """Returns a new decode state."""
        return self.model(self.params).init_state(batch, capacity)

    def run(self, segment_ids: np.ndarray | None, inputs=None, weights=None, targets_=None):
        """Computes logits, loss and gradients of the standard batch; arguments replace parts of it."""
        inputs = tokens() if inputs is None else inputs
        weights = real_tokens(segment_ids).astype(np.float32) if weights is None else weights.astype(np.float32)
        targets_ = targets() if targets_ is None else targets_
        (loss, logits), grads = self.loss_and_grads(self.params, inputs, targets_, weights, segment_ids)
        return np.asarray(logits), float(loss), jax.tree.map(np.asarray, grads)

    def oracle(
        self, segment_ids: np.ndarray | None, inputs=None, params=None, positions=None, visit=None, prefix=None
    ) -> np.ndarray:
        """Computes the oracle's logits in float64."""
        params = to_float64(self.params if params is None else params, self._constants)
        inputs = tokens() if inputs is None else inputs
        return language_model(with_biases(params), self.settings, inputs, segment_ids, positions, visit, prefix)

    def influence(self, segment_ids: np.ndarray | None) -> np.ndarray:
        """Size of the derivative of the loss of token t by the embedding of token u, B×L×L."""
        rows = []
        for t in range(LENGTH):
            weights = np.zeros((BATCH, LENGTH))
            weights[:, t] = 1
            _, _, grads = self.run(segment_ids, weights=weights)
            rows.append(np.abs(grads["embedding"]).sum(axis=-1)[tokens()])
        return np.stack(rows, axis=1)

    def _loss(self, params, inputs, targets_, weights, segment_ids):
        logits = self.model(params)(inputs, segment_ids)
        return (weights * optax.softmax_cross_entropy_with_integer_labels(logits, targets_)).sum(), logits


def to_float64(params: dict, constants: nnx.State) -> dict:
    """Merges parameters and untrained constants into one nested dict of float64 arrays."""

    def merge(a: dict, b: dict) -> dict:
        return a | {name: merge(a.get(name, {}), x) if isinstance(x, dict) else x for name, x in b.items()}

    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), merge(params, nnx.to_pure_dict(constants)))


@functools.cache
def _case(family: str, causal: bool, overrides: tuple) -> Case:
    return Case(family, causal, dict(overrides))


def case(family: str, causal: bool, **overrides) -> Case:
    """Returns the session's cached case."""
    return _case(family, causal, tuple(sorted(overrides.items())))


@functools.cache
def standard(family: str, causal: bool):
    """Logits, loss and gradients of the standard batch; computed once."""
    return case(family, causal).run(standard_segment_ids(family))


def assert_close(actual, expected, rtol: float, what: str = "") -> None:
    """Checks that errors are within rtol of the largest expected entry, the scale of the signal."""
    expected = np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=rtol * np.abs(expected).max(), err_msg=what)


# Ratio of the terms to their sum for a gradient that is one sum over all tokens and channels. It was measured with
# FLASH on the standard batch, with a separate scale per term (1505.5 to 2.956). Rounding is relative to the terms, and
# differs between processors.
CANCELLING = {"['positions']['scale']": 509}


def assert_trees_close(actual: dict, expected: dict, rtol: float) -> None:
    """Applies `assert_close` to each parameter; sums that cancel may differ by half a float32 unit of their terms."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, a), e in zip(jax.tree_util.tree_leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        assert_close(a, e, max(rtol, CANCELLING.get(name, 0) * 2.0**-24), name)


def state_bytes(state) -> int:
    """Size of a decode state in bytes; accepts shapes, too."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))


def set_positions(state, positions: np.ndarray):
    """Returns the state as if its sequences had consumed this many tokens."""
    return dataclasses.replace(state, positions_B=jnp.asarray(positions, jnp.int32))
