"""flash-lm evaluate --workdir=runs/x[@best] [--split=test] [--lengths=512,1024] [--carry]."""

import argparse
import math

from flash_lm.cli.flags import add_run_flags, parse_run, results_file
from flash_lm.cli.run import run
from flash_lm.cli.types import any_path, parse_integers, positive, split_words
from flash_lm.config.registry import TASKS
from flash_lm.runs.jsonl import append_jsonl


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm evaluate", description=main.__doc__)
    add_run_flags(parser)
    parser.add_argument("--split", default="test", help="train, validation, test or whole (the full corpus)")
    parser.add_argument("--lengths", default="", help="sequence lengths, such as 512,1024; default: the run's")
    parser.add_argument(
        "--carry", action="store_true", help="score documents with the state carried from sequence to sequence"
    )
    parser.add_argument("--first", type=positive, help="with --carry: tokens per document to score, in full sequences")
    parser.add_argument(
        "--slices",
        help="score subsets of the targets, such as all,recall: recall (predictable only from earlier in the "
        "sequence), positions (by number of preceding tokens), parts (synthetic data, mixtures), and all targets",
    )
    parser.add_argument(
        "--rare", type=positive, help="with --slices=recall: largest training count of a rare pair of tokens"
    )
    parser.add_argument(
        "--results",
        type=any_path,
        help="a JSONL file; default: in the run's folder results.jsonl, or carried.jsonl or slices.jsonl",
    )
    return parser


def main(argv: list[str]) -> None:
    """Scores a run's checkpoint on a split and appends the results to a JSONL file.

    --config.data.KEY=VALUE selects a text other than the run's own; --split=whole scores all of it.
    """
    arguments, overrides = flags().parse_known_args(argv)
    from flash_lm.data.slices import ALL
    from flash_lm.inference.scoring import evaluate
    from flash_lm.runs.hosts import is_first
    from flash_lm.runs.lost_hosts import report_lost_host

    lengths = parse_integers(arguments.lengths, "--lengths") if arguments.lengths else []
    # Joins the other hosts, if any, before JAX looks for devices.
    name, mesh = parse_run(arguments)
    # Separate files: results.jsonl has only scores of independent sequences, which comparisons rank.
    file = "carried.jsonl" if arguments.carry else "slices.jsonl" if arguments.slices else "results.jsonl"
    out = results_file(arguments, name, file)
    # Every host scores its share; the first one prints and writes.
    with report_lost_host():
        results = evaluate(
            name,
            arguments.split,
            lengths,
            carry=arguments.carry,
            first=arguments.first,
            slices=split_words(arguments.slices or ALL),
            rare=arguments.rare,
            mesh_shape=mesh,
            overrides=overrides,
        )
    if not is_first():
        return
    for result in results:
        # One line per result: labels have intervals, tokens have a perplexity.
        part = f", {result['slice']}" if "slice" in result else ""
        what = (
            f"{result['family']} on {result['corpus']} {result['split']}{part} at length {result['length']}, step "
            f"{result['step']}"
        )
        if "majority" in result:
            print(
                f"{what}: accuracy {result['accuracy']:.2%} (95 %: {result['accuracy_low']:.2%} to "
                f"{result['accuracy_high']:.2%}), macro F1 {result['macro_f1']:.3f} ({result['macro_f1_low']:.3f} to "
                f"{result['macro_f1_high']:.3f}), Matthews {result['matthews']:.3f} ({result['matthews_low']:.3f} to "
                f"{result['matthews_high']:.3f}), loss {result['loss']:.3f}, over {result['tokens']:.0f} examples; "
                f"the most frequent label is {result['majority']:.2%} of them"
                + (f", and {result['cut']:.1%} are truncated" if result["cut"] else "")
            )
            continue
        # The words between the spaces of code say nothing.
        has_words = "word_perplexity" in result and not result["corpus"].startswith("stdlib")
        word = f" {result['word_perplexity']:.1f} per word," if has_words else ""
        accuracy = f"accuracy {result['accuracy']:.2%} " if "accuracy" in result else ""
        task = TASKS[result["task"]]
        prefix, suffix = task.answers.scored, task.conditioning.scored
        print(
            f"{what}: perplexity {result['perplexity']:.3f} per{prefix} token,{word} "
            f"{result['bits_per_byte']:.4f} bits per byte, {accuracy}over {result['tokens']:.0f}{prefix} tokens{suffix}"
            + (
                f"; the best reader's perplexity is {math.exp(result['best_loss']):.3f}"
                if "best_loss" in result
                else ""
            )
        )
        for span in result.get("by_position", ()):
            print(
                f"  positions {span['from']} to {span['to'] - 1}: perplexity {span['perplexity']:.3f}, "
                f"{span['perplexity_alone']:.3f} in independent sequences, over {span['tokens']:.0f} tokens"
            )
    append_jsonl(out, results)


if __name__ == "__main__":
    run(main, flags)
