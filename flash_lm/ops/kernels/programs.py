"""The Pallas programs: weighted values, derivatives of scores, and the sums that enter chunks.

One source serves a GPU (through Triton), a TPU (through Mosaic) and, interpreted, any machine. A program makes one tile
of its result and loops over the terms of its sum, so that no array of weights leaves the chip. Rows of scores may be
queries or, transposed, keys: the derivative of the values is the same sum with the two exchanged.

Arrays have the folded batch N = B·H and chunks G as their first dimensions; those of `Seen` have B rows, or 1.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flash_lm.ops.attention_functions import ELEMENTWISE
from flash_lm.ops.kernels.backends import BACKENDS, Backend
from flash_lm.ops.log_decay import Running
from flash_lm.ops.visibility import is_between

Ids = tuple[jax.Array, ...]  # indices of a program in the grid


class Seen(NamedTuple):
    """The keys that each query sees, from `first` of its chunk to before `stop`, and 1 / N; (B or 1)×G×C."""

    first: Any
    stop: Any
    inverse: Any


class Form(NamedTuple):
    """Static settings: a name of `ELEMENTWISE`, the factor of q kᵀ, a name of `BACKENDS`."""

    function: str
    scale: float
    backend: str


def weighted_values(
    form: Form,
    rows_NxGxIxK: jax.Array,
    columns_NxGxJxK: jax.Array,
    values_NxGxJxE: jax.Array,
    seen: Seen,
    bias_1xW: jax.Array | None,
    entering: tuple[jax.Array, jax.Array] | None,
    decay: Running | None = None,
    *,
    transposed: bool = False,
) -> jax.Array:
    """Weights times values, plus what enters the chunk: f(scale · rows columnsᵀ + b) / N · values + x · sum.

    With decays a weight is multiplied by what decays after the key up to and including the query.

    Args:
        form: form of the weights.
        rows_NxGxIxK: queries; transposed: keys.
        columns_NxGxJxK: keys; transposed: queries.
        values_NxGxJxE: values, one a column.
        seen: what the queries see.
        bias_1xW: bias for the distances 1 − I … J − 1 from row to column, float32.
        entering: x, N×G×I×K, and the sums, N×G×K×E.
        decay: running sums of logarithms of decays, N×G×I, where J = I; None: nothing decays.
        transposed: rows are keys.

    Returns:
        N×G×I×E, dtype of the values.
    """
    backend = BACKENDS[form.backend]
    (batch, chunks, length, width), (columns, expanded) = rows_NxGxIxK.shape, values_NxGxJxE.shape[2:]
    tile = backend.tile
    depth = math.gcd(expanded, tile.values(values_NxGxJxE.dtype, entering=entering is not None))
    spans = _spans(seen, length if transposed else columns, tile.rows, tile.columns, transposed)
    row_of = _rows(batch, seen.inverse)
    of_rows = lambda *size: _block(lambda n, g, e, i: (n, g, i, 0), *size)
    of_columns = lambda *size: _block(lambda n, g, e, i: (n, g, 0, 0), *size)
    if transposed:
        about = _block(lambda n, g, e, i: (row_of(n), g, 0, 0), 1, columns)
    else:
        about = _block(lambda n, g, e, i: (row_of(n), g, i, 0), tile.rows, 1)
    inputs = _score_derivative(backend, seen, about, 2 if transposed else 3, spans, bias_1xW) | {
        "rows": (rows_NxGxIxK, of_rows(tile.rows, width)),
        "columns": (columns_NxGxJxK, of_columns(columns, width)),
        "values": (values_NxGxJxE, _block(lambda n, g, e, i: (n, g, 0, e), columns, depth)),
    }
    if decay is not None:
        of_these = _block(lambda n, g, e, i: (n, g, i, 0), tile.rows, 1)
        of_those = _block(lambda n, g, e, i: (n, g, 0, 0), 1, columns)
        inputs |= _decay_derivative(decay, of_these, decay, of_those)
    if entering is not None:
        x_NxGxIxK, sum_NxGxKxE = entering
        inputs["x"] = (x_NxGxIxK, of_rows(tile.rows, x_NxGxIxK.shape[-1]))
        inputs["sum"] = (sum_NxGxKxE, _block(lambda n, g, e, i: (n, g, 0, e), x_NxGxIxK.shape[-1], depth))

    def program(ids: Ids, refs: dict, out_ref) -> None:
        n, g, _, i = ids
        rows = refs["rows"][...]
        about_rows = None if transposed else Seen(*(ref[...] for ref in refs["seen"]))

        def add(j: jax.Array, total: jax.Array) -> jax.Array:
            tile_slice = pl.ds(pl.multiple_of(j * tile.columns, tile.columns), tile.columns)
            about = about_rows or Seen(*(ref[:, tile_slice] for ref in refs["seen"]))
            scores = _scores(form, rows, refs["columns"][tile_slice, :], refs.get("bias"), i, j, length)
            weights = ELEMENTWISE[form.function].function(scores) * about.inverse
            key = (i * tile.rows, 0) if transposed else (j * tile.columns, 1)
            visible = _visible(about, *key, scores.shape)
            if decay is not None:
                passed = _passed(refs, tile_slice)
                weights *= jnp.exp(jnp.where(visible, -passed if transposed else passed, 0))
            weights = jnp.where(visible, weights, 0)
            return total + _dot(weights.astype(values_NxGxJxE.dtype), refs["values"][tile_slice, :])

        total = jnp.zeros((tile.rows, depth), jnp.float32)
        if entering is not None:
            total += _dot(refs["x"][...], refs["sum"][...])
        row = row_of(n)
        total = jax.lax.fori_loop(refs["first"][row, g, i], refs["stop"][row, g, i], add, total)
        out_ref[...] = total.astype(out_ref.dtype)

    grid = (batch, chunks, expanded // depth, length // tile.rows)
    out = jax.ShapeDtypeStruct((batch, chunks, length, expanded), values_NxGxJxE.dtype)
    spec = _block(lambda n, g, e, i: (n, g, i, e), tile.rows, depth)
    # Later queries of a causal row see more keys; the programs that take longest come first.
    return _call(program, backend, "weighted_values", grid, inputs, out, spec, descending=not transposed)


def score_derivatives(
    form: Form,
    q_NxGxIxK: jax.Array,
    k_NxGxJxK: jax.Array,
    d_out_NxGxIxE: jax.Array,
    v_NxGxJxE: jax.Array,
    seen: Seen,
    bias_1xW: jax.Array | None,
    decays: tuple[Running, Running] | None = None,
) -> jax.Array:
    """The derivative of the scores, f′(scale · q kᵀ + b) / N · d_out vᵀ, zero for invisible pairs.

    Args:
        form: form of the weights.
        q_NxGxIxK: queries.
        k_NxGxJxK: keys.
        d_out_NxGxIxE: derivative of the output.
        v_NxGxJxE: values.
        seen: what the queries see.
        bias_1xW: bias for the distances 1 − I … J − 1 from query to key, float32.
        decays: as for `weighted_values`, of the queries, N×G×I, and of the keys, N×G×J.

    Returns:
        N×G×I×J, dtype of the queries.
    """
    backend = BACKENDS[form.backend]
    tile, side = backend.tile, backend.tile.rows
    (batch, chunks, length, width), expanded = q_NxGxIxK.shape, v_NxGxJxE.shape[-1]
    keys, depth = k_NxGxJxK.shape[2], math.gcd(expanded, tile.depth)
    spans = _spans(seen, keys, side, side, False)
    row_of = _rows(batch, seen.inverse)
    of_queries = lambda size: _block(lambda n, g, i, j: (n, g, i, 0), side, size)
    of_keys = lambda size: _block(lambda n, g, i, j: (n, g, j, 0), side, size)
    about = _block(lambda n, g, i, j: (row_of(n), g, i, 0), side, 1)
    inputs = _score_derivative(backend, seen, about, 3, spans, bias_1xW) | {
        "rows": (q_NxGxIxK, of_queries(width)),
        "columns": (k_NxGxJxK, of_keys(width)),
        "d_out": (d_out_NxGxIxE, of_queries(expanded)),
        "values": (v_NxGxJxE, of_keys(expanded)),
    }
    if decays is not None:
        of_these = _block(lambda n, g, i, j: (n, g, i, 0), side, 1)
        of_those = _block(lambda n, g, i, j: (n, g, 0, j), 1, side)
        inputs |= _decay_derivative(decays[0], of_these, decays[1], of_those)

    def program(ids: Ids, refs: dict, out_ref) -> None:
        n, g, i, j = ids
        row = row_of(n)
        touched = (refs["first"][row, g, i] <= j) & (j < refs["stop"][row, g, i])

        def add(e: jax.Array, total: jax.Array) -> jax.Array:
            tile_slice = pl.ds(pl.multiple_of(e * depth, depth), depth)
            return total + _dot(refs["d_out"][:, tile_slice], refs["values"][:, tile_slice], transpose=True)

        # No steps at all if no query sees a key.
        steps = touched.astype(jnp.int32) * (expanded // depth)
        pull = jax.lax.fori_loop(0, steps, add, jnp.zeros((side, side), jnp.float32))
        about = Seen(*(ref[...] for ref in refs["seen"]))
        scores = _scores(form, refs["rows"][...], refs["columns"][...], refs.get("bias"), i, j, length)
        slope = ELEMENTWISE[form.function].derivative(scores) * about.inverse
        visible = _visible(about, j * side, 1, scores.shape)
        if decays is not None:
            slope *= jnp.exp(jnp.where(visible, _passed(refs, slice(None)), 0))
        slope = jnp.where(visible, slope, 0)
        out_ref[...] = (slope * pull).astype(out_ref.dtype)

    grid = (batch, chunks, length // side, keys // side)
    out = jax.ShapeDtypeStruct((batch, chunks, length, keys), q_NxGxIxK.dtype)
    spec = _block(lambda n, g, i, j: (n, g, i, j), side, side)
    return _call(program, backend, "score_derivatives", grid, inputs, out, spec)


def entering_sums(
    backend: Backend, k_NxGxCxK: jax.Array, v_NxGxCxE: jax.Array, goes_on_BxG: jax.Array, *, reverse: bool = False
) -> jax.Array:
    """States Σ kᵀv that enter the chunks; a state passes through a chunk if its document continues after it.

    Args:
        backend: backend to run on.
        k_NxGxCxK: keys, zero if their document does not continue into the next chunk.
        v_NxGxCxE: values.
        goes_on_BxG: 1 if the sum that enters a chunk leaves it too, else 0; (B or 1)×G int32.
        reverse: sum over the chunks after each one instead.

    Returns:
        N×G×K×E, dtype of the values; sums are in float32.
    """
    (batch, chunks, size, width), expanded = k_NxGxCxK.shape, v_NxGxCxE.shape[-1]
    tile = backend.tile
    depth, keys = math.gcd(expanded, tile.sums), math.gcd(width, tile.keys)
    # Inputs: whether a chunk continues the document of the one before, its keys and its values.
    row_of = _rows(batch, goes_on_BxG)
    inputs = {
        "goes_on": (goes_on_BxG, backend.scalars()),
        "keys": (k_NxGxCxK, _block(lambda n, e, k: (n, 0, 0, k), chunks, size, keys)),
        "values": (v_NxGxCxE, _block(lambda n, e, k: (n, 0, 0, e), chunks, size, depth)),
    }

    def program(ids: Ids, refs: dict, out_ref) -> None:
        row = row_of(ids[0])

        # Writes the state that enters a chunk, then adds the chunk to it; documents reset the state.
        def chunk(index: jax.Array, total: jax.Array) -> jax.Array:
            g = chunks - 1 - index if reverse else index
            out_ref[g, :, :] = total.astype(out_ref.dtype)

            def add(c: jax.Array, total: jax.Array) -> jax.Array:
                tile_slice = pl.ds(pl.multiple_of(c * tile.columns, tile.columns), tile.columns)
                return total + _dot(refs["keys"][g, tile_slice, :].T, refs["values"][g, tile_slice, :])

            kept = total * refs["goes_on"][row, g].astype(jnp.float32)
            return jax.lax.fori_loop(0, size // tile.columns, add, kept)

        jax.lax.fori_loop(0, chunks, chunk, jnp.zeros((keys, depth), jnp.float32))

    out = jax.ShapeDtypeStruct((batch, chunks, width, expanded), v_NxGxCxE.dtype)
    spec = _block(lambda n, e, k: (n, 0, k, e), chunks, keys, depth)
    grid = (batch, expanded // depth, width // keys)
    return _call(program, backend, "entering_sums", grid, inputs, out, spec)


def _scores(form: Form, rows: jax.Array, columns: jax.Array, bias_ref, i, j, length: int) -> jax.Array:
    """A tile of scores, for the i-th tile of rows and the j-th of columns, float32; `length`: rows of all tiles."""
    scores = _dot(rows, columns, transpose=True) * form.scale
    if bias_ref is None:
        return scores
    start = j * columns.shape[0] - i * rows.shape[0] + length - rows.shape[0]
    return scores + BACKENDS[form.backend].diagonals(bias_ref, start, scores.shape)


def _visible(about: Seen, first: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """Which pairs of a tile are visible; keys are along `axis`, starting at `first`."""
    key = first + jax.lax.broadcasted_iota(jnp.int32, shape, axis)
    return is_between(about.first, key, about.stop)


def _dot(a: jax.Array, b: jax.Array, *, transpose: bool = False) -> jax.Array:
    contract = ((1,), (1 if transpose else 0,))
    return jax.lax.dot_general(a, b, (contract, ((), ())), preferred_element_type=jnp.float32)


def _spans(seen: Seen, keys: int, rows: int, columns: int, transposed: bool) -> tuple[jax.Array, jax.Array]:
    """The first tile of columns that each tile of rows needs, and the one after the last: (B or 1)×G×… int32."""
    size_q, size_k = (columns, rows) if transposed else (rows, columns)
    tiles = lambda x, none: jnp.where(seen.first < seen.stop, x, none).reshape(*x.shape[:2], -1, size_q)
    low, high = tiles(seen.first, keys).min(axis=-1), tiles(seen.stop, 0).max(axis=-1)
    start_J = jnp.arange(0, keys, size_k, dtype=jnp.int32)[None, None, None]
    touches = (low[..., None] < start_J + size_k) & (high[..., None] > start_J)
    touches = jnp.swapaxes(touches, -1, -2) if transposed else touches
    count, some = touches.shape[-1], touches.any(axis=-1)
    first = jnp.where(some, jnp.argmax(touches, axis=-1), 0).astype(jnp.int32)
    stop = jnp.where(some, count - jnp.argmax(jnp.flip(touches, -1), axis=-1), 0).astype(jnp.int32)
    return first, stop


def _rows(batch: int, about: jax.Array) -> Callable[[jax.Array], jax.Array]:
    """Index of the folded batch -> index in an array with B rows, or 1."""
    heads = batch // about.shape[0]
    # Not //, because its lowering for a TPU asks which TPU it is.
    return lambda n: jax.lax.div(n, jnp.int32(heads))


def _score_derivative(
    backend: Backend, seen: Seen, about: pl.BlockSpec, axis: int, spans: tuple[jax.Array, jax.Array], bias_1xW: Any
) -> dict[str, tuple[Any, Any]]:
    """Inputs of a program's scores besides their factors; `about`: block of what is seen, put along `axis`."""
    inputs: dict[str, tuple[Any, Any]] = {
        "first": (spans[0], backend.scalars()),
        "stop": (spans[1], backend.scalars()),
        "seen": (Seen(*(jnp.expand_dims(x, axis) for x in seen)), Seen(about, about, about)),
    }
    if bias_1xW is not None:
        inputs["bias"] = (bias_1xW, pl.BlockSpec(bias_1xW.shape, lambda *_: (0, 0)))
    return inputs


def _decay_derivative(
    rows: Running, of_rows: pl.BlockSpec, columns: Running, of_columns: pl.BlockSpec
) -> dict[str, tuple[Any, Any]]:
    """Inputs of a program whose weights decay."""
    put = lambda sums, axis: sums.at(lambda x: jnp.expand_dims(x, axis))
    twice = lambda block: Running(*[block] * len(Running._fields))
    return {"row_decay": (put(rows, 3), twice(of_rows)), "column_decay": (put(columns, 2), twice(of_columns))}


def _passed(refs: dict, tile_slice: Any) -> jax.Array:
    """Logarithms of the decay from each column, of the slice, to each row; exact for near ones."""
    rows = Running(*(ref[...] for ref in refs["row_decay"]))
    columns = Running(*(ref[:, tile_slice] for ref in refs["column_decay"]))
    return (rows.coarse - columns.coarse) + (rows.fine - columns.fine)


def _block(index_map: Callable, *size: int) -> pl.BlockSpec:
    """A block of an array of four dimensions; leading ones that are not in `size` are dropped in the program."""
    return pl.BlockSpec((None,) * (4 - len(size)) + size, index_map)


def _call(
    program: Callable, backend: Backend, name: str, grid: tuple, inputs: dict, out: Any, spec, descending: bool = False
) -> jax.Array:
    """Calls a program (ids, refs, output's ref) for each place of a grid; neighbours differ in its last dimension.

    With `descending`, that dimension runs backwards.
    """

    # Backends differ in which grid axis runs fastest; programs see one order.
    def ids_of(*places: jax.Array) -> Ids:
        ids = places[::-1] if backend.first_is_fastest else places
        return (*ids[:-1], grid[-1] - 1 - ids[-1]) if descending else ids

    def reorder_axes(block: pl.BlockSpec) -> pl.BlockSpec:
        index_map = block.index_map
        return block if index_map is None else pl.BlockSpec(block.block_shape, lambda *p: index_map(*ids_of(*p)))

    arrays = {key: array for key, (array, _) in inputs.items()}
    is_block = lambda x: isinstance(x, pl.BlockSpec)
    specs = jax.tree.map(reorder_axes, {key: block for key, (_, block) in inputs.items()}, is_leaf=is_block)
    call = pl.pallas_call(
        lambda refs, out_ref: program(ids_of(*(pl.program_id(axis) for axis in range(len(grid)))), refs, out_ref),
        out_shape=out,
        grid=grid[::-1] if backend.first_is_fastest else grid,
        in_specs=[specs],
        out_specs=reorder_axes(spec),
        name=name,
        **backend.options(len(grid)),
    )
    return call(arrays)
