"""python -m flash_lm.evaluate --workdir=runs/x[@best] [--split=test] [--lengths=512,1024] [--carry]."""

import argparse
import pathlib

from flash_lm.command import positive, run, whole_numbers
from flash_lm.jsonl import append_jsonl
from flash_lm.run_flags import add_run_flags, run_of
from flash_lm.tables import TASKS


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="python -m flash_lm.evaluate", description=main.__doc__)
    add_run_flags(parser)
    parser.add_argument("--split", default="test", help="train, validation, test or whole (all of it)")
    parser.add_argument("--lengths", default="", help="row lengths, such as 512,1024; default: the run's own")
    parser.add_argument(
        "--carry", action="store_true", help="score whole documents, each row with the state of the rows before"
    )
    parser.add_argument("--first", type=positive, help="with --carry: tokens of each document to score, in whole rows")
    parser.add_argument(
        "--out", type=pathlib.Path, help="a JSONL file; default: in the run's folder results.jsonl, or carried.jsonl"
    )
    return parser


def main(argv: list[str]) -> None:
    """Scores a run's checkpoint on a split and appends the results to a JSONL file.

    --config.data.KEY=VALUE selects a text other than the run's own; --split=whole scores all of it.
    """
    arguments, overrides = flags().parse_known_args(argv)
    from flash_lm.inference.scoring import evaluate
    from flash_lm.training.hosts import is_first, lost_hosts_reported

    lengths = whole_numbers(arguments.lengths, "--lengths") if arguments.lengths else []
    name, mesh = run_of(arguments)
    with lost_hosts_reported():
        results = evaluate(
            name,
            arguments.split,
            lengths,
            carry=arguments.carry,
            first=arguments.first,
            mesh_shape=mesh,
            overrides=overrides,
        )
    if not is_first():
        return
    # In a file of their own: what reads results compares rows by themselves.
    append_jsonl(arguments.out or name.workdir / ("carried.jsonl" if arguments.carry else "results.jsonl"), results)
    for result in results:
        word = f" {result['word_perplexity']:.1f} per word," if "word_perplexity" in result else ""
        accuracy = f"accuracy {result['accuracy']:.2%} " if "accuracy" in result else ""
        masked = " masked" if TASKS[result["task"]].answers == "fill_in" else ""
        print(
            f"{result['family']} on {result['corpus']} {result['split']} at length {result['length']}, step "
            f"{result['step']}: perplexity {result['perplexity']:.3f} per{masked} token,{word} "
            f"{result['bits_per_byte']:.4f} bits per byte, {accuracy}over {result['tokens']:.0f}{masked} tokens"
        )
        for span in result.get("by_position", ()):
            print(
                f"  positions {span['from']} to {span['to'] - 1}: perplexity {span['perplexity']:.3f}, "
                f"{span['perplexity_alone']:.3f} in rows by themselves, over {span['tokens']:.0f} tokens"
            )


if __name__ == "__main__":
    run(main, flags)
