"""Times one attention layer by sequence length: does its time per token stay the same?

    python -m benchmarks.steps.layer --families="longformer linear_transformer" --lengths="1024 8192" \
        --out=benchmarks/steps/results/layer [--config.model.window.size=64 …]

A turn is the forward and backward pass of a family's first sublayer over the same number of tokens at each length. All
families and lengths take turns. A family may have other keys, as in longformer+window.size=64.
"""

import argparse
import pathlib
from typing import Any

import jax
from flax import nnx

import flash_lm
from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import parse_integers, positive
from flash_lm.config.overrides import variant
from flash_lm.errors import InputError
from flash_lm.families.family import common_forms
from flash_lm.report.markdown import pivot
from flash_lm.runs.jsonl import write_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.timing.turns import ROUNDS, Cell, make_turn, take_turns

NOT_OF_A_LAYER = ("family", "vocab_size", "absolute_positions", "causal", "max_length")


def check(families: list[str], lengths: list[int], tokens: int) -> None:
    """Raises InputError if a family has no causal form, or the tokens are no multiple of a sequence length."""
    if masked := [family for family in families if "causal" not in common_forms([family])]:
        raise InputError(f"--families: {', '.join(masked)} has no causal form")
    if odd := [n for n in lengths if tokens % n]:
        raise InputError(f"--tokens_per_step={tokens} is not a multiple of --lengths={odd[0]}")


def layer_cell(family: str, config: Any, length: int, tokens: int) -> Cell:
    """Returns a cell whose turn is the layer's forward and backward pass over sequences of `length` tokens."""
    keys = {name: value for name, value in config.model.to_dict().items() if name not in NOT_OF_A_LAYER}
    mixer = flash_lm.build_mixer(family, rngs=nnx.Rngs(0), max_length=length, **keys)
    graph, params = nnx.split(mixer)
    shape = (tokens // length, length, config.model.model_dim)
    x, d_out = (jax.random.normal(key, shape, config.model.dtype) for key in jax.random.split(jax.random.key(0)))

    @jax.jit
    def derivatives(params: nnx.State, x: jax.Array, d_out: jax.Array) -> tuple[nnx.State, jax.Array]:
        _, pull = jax.vjp(lambda params, x: nnx.merge(graph, params)(x), params, x)
        return pull(d_out)

    return Cell.compile(family, make_turn(lambda: jax.block_until_ready(derivatives(params, x, d_out))))


def main(argv: list[str]) -> None:
    """Writes layers.jsonl and table.md to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--families", required=True, help="separated by spaces, each may have +key=value")
    parser.add_argument("--lengths", default="1024 8192", help="sequence lengths, the shortest first")
    parser.add_argument("--tokens_per_step", type=positive, default=8192)
    parser.add_argument("--size", default="small", help="a config, as in configs/")
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments, overrides = parser.parse_known_args(argv)
    config, tokens = load_config(arguments.size, overrides), arguments.tokens_per_step
    lengths, words = parse_integers(arguments.lengths), arguments.families.split()
    # Check everything before anything is measured.
    variants = {word: variant(config, word) for word in words}
    check([family for family, _ in variants.values()], lengths, tokens)
    arguments.out.mkdir(parents=True, exist_ok=True)
    # All families and lengths take turns.
    cells = {(word, n): layer_cell(*variants[word], n, tokens) for word in words for n in lengths}
    take_turns(list(cells.values()), arguments.rounds, lambda text: print(text, flush=True))
    # Write lines and table.
    about = {"tokens_per_step": tokens, "size": arguments.size} | provenance(jax.devices()[0].device_kind)
    lines = [
        {"family": word, "length": n, "median_ms": cell.median_ms, "iqr_ms": cell.iqr_ms}
        | {"over_shortest": cell.median_ms / cells[word, lengths[0]].median_ms}
        | about
        for (word, n), cell in cells.items()
    ]
    write_jsonl(arguments.out / "layers.jsonl", lines)
    text = "\n\n".join(
        [
            f"One layer, forward and backward, {tokens:,} tokens: size {arguments.size}, {about['device']}",
            f"Milliseconds, by sequence length\n\n{pivot(lines, 'family', 'length', 'median_ms', '{:,.0f}')}",
            f"Times that of {lengths[0]:,}\n\n{pivot(lines, 'family', 'length', 'over_shortest', '{:.2f}')}",
        ]
    )
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run(main)
