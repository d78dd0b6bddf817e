"""Draws which pairs of tokens each family connects, from its code: docs/families/pictures/FAMILY.svg.

python docs/tools/draw_families.py [--families="flash performer" --out=docs/families/pictures]

A row is a query, a column a key. Parameters are drawn many times, since relu² makes a score zero in half of the draws;
a pair whose weight is zero in all draws is not visible. A comment on the family's page sets keys for its picture,
<!-- picture: chunks.size=6 -->, and draws=1 if the mask depends on the tokens.
"""

import argparse
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from flash_lm import build_model
from flash_lm.cli.run import run
from flash_lm.config.registry import FAMILIES
from flash_lm.configs import base
from flash_lm.models.attention_weights import attention_weights

_FOLDER = pathlib.Path(__file__).parents[1] / "families"
_LENGTH, _DRAWS, _SPREAD = 24, 40, 0.3
_SHAPE = {
    "num_layers": 1,
    "model_dim": 16,
    "num_heads": 2,
    "max_length": _LENGTH,
    "vocab_size": 64,
    "init": "lecun",
    "scan_layers": False,
}
# Kind of a pair -> colour, legible on light and dark backgrounds.
_COLOURS = {
    "seen": "#4a86c5",
    "local": "#4a86c5",
    "global": "#d9903d",
    "seen, with a position bias": "#2f9e77",
    "not seen": "#8884",
}
_CELL, _GAP, _TEXT = 7, 40, 16


def _picture_keys(family: str) -> dict[str, int]:
    """Reads the keys for the picture from the comment on the family's page."""
    page = _FOLDER / f"{family}.md"
    comment = re.search(r"<!-- picture: (.*) -->", page.read_text(encoding="utf-8")) if page.exists() else None
    words = comment[1].split() if comment else []
    return {key: int(value) for key, _, value in (word.partition("=") for word in words)}


def kinds(family: str, causal: bool) -> dict[str, np.ndarray]:
    """Returns the visible pairs of tokens, L×L of bool, for each part of a family's attention."""
    config: Any = base.get_config().model
    keys = _picture_keys(family)
    draws = keys.pop("draws", _DRAWS)
    config.update_from_flattened_dict({**_SHAPE, **keys, "family": family, "causal": causal})
    # A small model; each draw adds noise to its parameters.
    graph, params, others = nnx.split(build_model(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    parts: list[str] = []

    def weights(key: jax.Array) -> list[jax.Array]:
        random_keys = iter(jax.random.split(key, len(jax.tree.leaves(params))))
        drawn = jax.tree.map(lambda x: x + _SPREAD * jax.random.normal(next(random_keys), x.shape), params)
        maps = attention_weights(nnx.merge(graph, drawn, others), jnp.arange(_LENGTH)[None])
        first = [one for one in maps if (one.layer, one.sublayer) == (0, FAMILIES[family].mixer)]
        parts[:] = [one.term for one in first]
        return [one.weights_BxHxLxL[0] for one in first]

    arrays = jax.jit(jax.vmap(weights))(jax.random.split(jax.random.key(0), draws))
    weights_by_part = {name: np.asarray(x).reshape(-1, _LENGTH, _LENGTH) for name, x in zip(parts, arrays, strict=True)}
    # A pair is visible if its weight is not zero in some draw.
    biased = weights_by_part.pop("exp(w)", None)
    seen = {name: (x != 0).any(0) for name, x in weights_by_part.items()}
    if biased is None:
        return {"seen": seen["attention"]} if "attention" in seen else seen
    has_bias = seen["attention"] & (biased != 1).any(0)
    return {"seen": seen["attention"] & ~has_bias, "seen, with a position bias": has_bias}


def picture(family: str) -> str:
    """Draws an SVG with a square of pairs for each form of a family: causal, bidirectional."""
    squares, x, legend = [], 0, {}
    for form, causal in (("causal", True), ("bidirectional", False)):
        if form not in FAMILIES[family].serves:
            continue
        visible = {name: pairs for name, pairs in kinds(family, causal).items() if pairs.any()}
        hidden = ~np.any(list(visible.values()), axis=0)
        squares += [f'<text x="{x}" y="{_TEXT - 5}">{form}</text>']
        squares += [_square(pairs, _COLOURS[name], x) for name, pairs in [*visible.items(), ("not seen", hidden)]]
        legend |= dict.fromkeys(visible)
        x += _LENGTH * _CELL + _GAP
    width, top = x - _GAP, _TEXT + _LENGTH * _CELL + 20
    for i, name in enumerate(legend):
        y = top + 18 * i
        squares.append(f'<rect x="0" y="{y - 9}" width="10" height="10" fill="{_COLOURS[name]}"/>')
        squares.append(f'<text x="16" y="{y}">{name}</text>')
    height = top + 18 * len(legend) - 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = 'font-family="sans-serif" font-size="12" fill="#888"'
    return "\n".join([f"{head} {style}>", *squares, "</svg>\n"])


def _square(pairs: np.ndarray, colour: str, left: int) -> str:
    """One path: a rectangle for each run of pairs in a row."""
    size = _CELL - 1
    runs = [
        f"M{left + start * _CELL} {_TEXT + row * _CELL}h{width}v{size}h-{width}z"
        for row in range(len(pairs))
        for start, stop in _runs(pairs[row])
        for width in [(stop - start) * _CELL - 1]
    ]
    return f'<path fill="{colour}" d="{"".join(runs)}"/>'


def _runs(row: np.ndarray) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def main(argv: list[str]) -> None:
    """Draws the pictures."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--families", default=" ".join(FAMILIES), help="names, separated by spaces")
    parser.add_argument("--out", type=pathlib.Path, default=_FOLDER / "pictures", help="folder to write")
    arguments = parser.parse_args(argv)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for family in arguments.families.split():
        (arguments.out / f"{family}.svg").write_text(picture(family), encoding="utf-8")


if __name__ == "__main__":
    run(main)
