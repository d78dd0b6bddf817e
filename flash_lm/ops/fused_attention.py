"""Softmax attention by the fused implementations of libraries: cuDNN, splash attention (TPU) and Tokamax.

None of them holds the weights of all pairs. They know causal masks, windows, lengths and, on a TPU, documents
(`MaskStructure`). What they do not know, cuDNN and Tokamax get as a mask of all pairs, and splash attention refuses.
"""

import functools
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from absl import flags

from flash_lm.ops.blocked_attention import KEPT
from flash_lm.ops.on_mesh import on_mesh, rows_per_device
from flash_lm.ops.target import target_platform
from flash_lm.ops.visibility import KeySpan, MaskStructure

_MOST_MASK_BYTES = 4 << 30  # of the masks of all pairs of a device
_MASK_BYTES = 5  # per pair: a bool, the bfloat16 that cuDNN adds to the scores, and the derivative of that
_LONGEST = 200  # characters of a library's words
_LANES = 128  # tokens in a tile of a TPU
_LARGEST_BLOCK = 512  # tokens in a block of splash attention
_SPLASH = "jax.experimental.pallas.ops.tpu.splash_attention"

Arrays = tuple[jax.Array, jax.Array, jax.Array]  # queries, keys, values
Mask = tuple[KeySpan, MaskStructure | None]


class Library(NamedTuple):
    """An implementation of a library.

    Attributes:
        platform: where it runs; None: anywhere.
        missing: why this installation does not have it, or None.
        attend: ((q, k, v), (key_span, structure), scale) -> B×H×L×E; arguments as for `fused_attention`.
        refuses: (queries, structure) -> why it should not compute this, or None.
    """

    platform: str | None
    missing: Callable[[], str | None]
    attend: Callable[[Arrays, Mask, float], jax.Array]
    refuses: Callable[[jax.Array, MaskStructure | None], str | None] = lambda q, structure: None


def fused_attention(
    implementation: str,
    q_BxHxLxK: jax.Array,
    k_BxHxMxK: jax.Array,
    v_BxHxMxE: jax.Array,
    key_span: KeySpan,
    structure: MaskStructure | None,
    *,
    scale: float,
) -> jax.Array:
    """Softmax attention softmax(scale · q kᵀ) v over the keys that each query sees.

    Args:
        implementation: a name of `LIBRARIES`.
        q_BxHxLxK: queries.
        k_BxHxMxK: keys; adjacent heads of queries may share one (grouped-query attention).
        v_BxHxMxE: values, with as many heads as the keys.
        key_span: keys that each query sees.
        structure: the same in terms of causality, window, lengths and documents; None: it has no such structure.
        scale: factor of q kᵀ.

    Returns:
        B×H×L×E, dtype of v. A query that sees no key gets zeros; but with a causal structure of one document per
        sequence, padding at the end sees the document.
    """
    out = LIBRARIES[implementation].attend((q_BxHxLxK, k_BxHxMxK, v_BxHxMxE), (key_span, structure), scale)
    if structure is not None and structure.causal and structure.documents is None:
        return out
    return jnp.where((key_span.count() > 0)[:, None, :, None], out, 0)


def problem(
    implementation: str,
    q_BxHxLxK: jax.Array,
    k_BxHxMxK: jax.Array,
    v_BxHxMxE: jax.Array,
    key_span: KeySpan,
    structure: MaskStructure | None,
    *,
    trains: bool = True,
) -> str | None:
    """Why an implementation cannot compute this attention here, in words; None: it can.

    `trains`: whether its derivative is needed, too.
    """
    if reason := unavailable(implementation) or LIBRARIES[implementation].refuses(q_BxHxLxK, structure):
        return reason
    if (size := mask_bytes(implementation, q_BxHxLxK, k_BxHxMxK, structure)) > _MOST_MASK_BYTES:
        return f"its mask of all pairs would take {size / 1e9:.0f} GB"
    arguments = (q_BxHxLxK, k_BxHxMxK, v_BxHxMxE), (key_span, structure)
    shapes, tree = jax.tree.flatten(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments))
    try:
        # The library checks shapes, dtype and device as it is traced, and cuDNN itself as it is compiled.
        jax.eval_shape(_trial(implementation, trains), *jax.tree.unflatten(tree, shapes))
        if jax.devices()[0].platform == target_platform() != "cpu":
            _compile(implementation, trains, tuple(shapes), tree)
    except Exception as error:  # a library may raise anything
        return " ".join(str(error).split())[:_LONGEST] or type(error).__name__
    return None


def _trial(implementation: str, trains: bool) -> Callable[[Arrays, Mask], Any]:
    """A function that needs all that attention of these arrays needs."""

    def total(arrays: Arrays, mask: Mask) -> jax.Array:
        return LIBRARIES[implementation].attend(arrays, mask, 1.0).astype(jnp.float32).sum()

    return jax.grad(total) if trains else total


@functools.cache
def _compile(implementation: str, trains: bool, shapes: tuple[jax.ShapeDtypeStruct, ...], tree: Any) -> None:
    jax.jit(_trial(implementation, trains)).lower(*jax.tree.unflatten(tree, shapes)).compile()


def is_cudnn(primitive: Any, *_: Any, **__: Any) -> bool:
    """A policy of `jax.checkpoint`: keep the results of cuDNN's attention, which nothing in jax.nn gives a name."""
    return primitive.name == "dot_product_attention_fwd_wrapper"


def unavailable(implementation: str) -> str | None:
    """Why this machine or installation does not have an implementation; None: it does."""
    library, platform = LIBRARIES[implementation], target_platform()
    if library.platform not in (None, platform):
        return f"it needs a {library.platform.upper()}, and this is a {platform.upper()}"
    return library.missing()


def mask_bytes(implementation: str, q: jax.Array, k: jax.Array, structure: MaskStructure | None) -> int:
    """Bytes per device of the mask of all pairs that an implementation needs for this structure; 0: none."""
    if implementation == "splash" or (structure is not None and structure.documents is None):
        return 0
    return _MASK_BYTES * rows_per_device(q.shape[0]) * q.shape[2] * k.shape[2]


def _cudnn(arrays: Arrays, mask: Mask, scale: float) -> jax.Array:
    """Flash attention by cuDNN: half precision on an NVIDIA GPU."""
    return _as_jax_nn(functools.partial(jax.nn.dot_product_attention, implementation="cudnn"), arrays, mask, scale)


def _tokamax(arrays: Arrays, mask: Mask, scale: float) -> jax.Array:
    """The best implementation that Tokamax finds."""
    tokamax: Any = importlib.import_module("tokamax")
    if not flags.FLAGS.is_parsed():  # else Tokamax parses the command line as its own
        flags.FLAGS.mark_as_parsed()
    attend = functools.partial(_as_jax_nn, tokamax.dot_product_attention, scale=scale)
    return on_mesh(attend, arrays, mask)


def _as_jax_nn(attend: Callable, arrays: Arrays, mask: Mask, scale: float) -> jax.Array:
    """Calls a function with the interface of `jax.nn.dot_product_attention`, whose arrays are B×L×H×K."""
    (q, k, _), (key_span, structure) = arrays, mask
    # With a mask, causality is said as well: blocks after the query are then skipped.
    about: dict[str, Any] = {"is_causal": structure is not None and structure.causal}
    if structure is None or structure.documents is not None:
        mask_BxLxM = key_span.visible(jnp.arange(k.shape[2], dtype=jnp.int32))
        about["mask"] = jnp.broadcast_to(mask_BxLxM, (q.shape[0], *mask_BxLxM.shape[1:]))[:, None]
    else:
        if structure.window is not None:
            about["local_window_size"] = (structure.window - 1, 0 if structure.causal else structure.window - 1)
        if structure.lengths is not None:
            # A sequence without keys would divide by zero; its output is replaced by zeros.
            about["key_value_seq_lengths"] = jnp.broadcast_to(jnp.maximum(structure.lengths, 1), (q.shape[0],))
    return jnp.swapaxes(attend(*(jnp.swapaxes(x, 1, 2) for x in arrays), scale=scale, **about), 1, 2)


def _splash(arrays: Arrays, mask: Mask, scale: float, *, interpret: bool = False) -> jax.Array:
    """Splash attention ("sparse flash attention", jax.experimental.pallas.ops.tpu), on a TPU or interpreted."""
    attend = functools.partial(_splash_on_device, scale=scale, interpret=interpret)
    return on_mesh(attend, arrays, mask[1])


def _splash_on_device(arrays: Arrays, structure: MaskStructure, scale: float, interpret: bool) -> jax.Array:
    """`_splash` on one device."""
    q, k, v = arrays
    # Documents are ids of queries and keys. Padded keys have one of their own, and padded queries are cut off.
    splash: Any = importlib.import_module(_SPLASH)
    batch, heads, length, _ = q.shape
    ids = structure.ids(batch, length, k.shape[2])
    if ids is None and (length % _LANES or k.shape[2] % _LANES):
        ids = jnp.ones((batch, length), jnp.int32), jnp.ones((batch, k.shape[2]), jnp.int32)
    of_rows = () if ids is None else (splash.SegmentIds(_to_lanes(ids[0], 1, 1), _to_lanes(ids[1], 1, -1)),)
    scaled = (q.astype(jnp.float32) * scale).astype(q.dtype)
    q, k, v = (_to_lanes(x, 2, 0) for x in (scaled, k, v))

    # The mask of all sequences and heads, computed inside the kernel.
    shape = (q.shape[2], k.shape[2])
    if structure.window is not None:
        reach = structure.window - 1
        mask = splash.LocalMask(shape, (reach, 0 if structure.causal else reach), 0)
    else:
        mask = splash.CausalMask(shape) if structure.causal else splash.FullMask(shape)

    block_q, block_kv = (math.gcd(size, _LARGEST_BLOCK) for size in shape)
    attend = splash.make_splash_mha(
        splash.MultiHeadMask([mask] * heads),
        block_sizes=splash.BlockSizes(
            block_q=block_q,
            block_kv=block_kv,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
        ),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=KEPT,
        interpret=interpret,
    )
    return jax.vmap(attend)(q, k, v, *of_rows)[:, :, :length]


def _to_lanes(x: jax.Array, axis: int, value: int) -> jax.Array:
    """Pads an axis to a multiple of a tile of the TPU."""
    missing = -x.shape[axis] % _LANES
    padding = [(0, missing if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, padding, constant_values=value) if missing else x


def _refused_by_cudnn(q: jax.Array, structure: MaskStructure | None) -> str | None:
    del structure
    return None if q.dtype.itemsize == 2 else f"it needs model.dtype=bfloat16, and this is {q.dtype.name}"


def _refused_by_splash(q: jax.Array, structure: MaskStructure | None) -> str | None:
    if structure is None:
        return "it cannot take the mask of a prefix or of a KV cache"
    return f"{q.shape[2]} queries would be mostly padding" if q.shape[2] < _LANES else None


def _without(module: str) -> str | None:
    try:
        found = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        found = None
    return None if found else f"{module} is not installed"


LIBRARIES = {
    "cudnn": Library("gpu", lambda: None, _cudnn, _refused_by_cudnn),
    "splash": Library("tpu", lambda: _without(_SPLASH), _splash, _refused_by_splash),
    "tokamax": Library(None, lambda: _without("tokamax"), _tokamax),
}
