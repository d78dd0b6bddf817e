"""python -m flash_lm.evaluate --workdir=runs/x [--split=test] [--lengths=512,1024] [--out=results.jsonl]."""

import argparse
import pathlib

from flash_lm.command import run, whole_numbers
from flash_lm.jsonl import append_jsonl
from flash_lm.training.evaluation import evaluate


def main(argv: list[str]) -> None:
    """Scores the newest checkpoint of a run on a split and appends the results to a JSONL file."""
    parser = argparse.ArgumentParser(prog="python -m flash_lm.evaluate", description=main.__doc__)
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="folder of the run")
    parser.add_argument("--split", default="test", help="train, validation or test")
    parser.add_argument("--lengths", default="", help="row lengths, such as 512,1024; default: the trained one")
    parser.add_argument("--out", type=pathlib.Path, help="default: results.jsonl of the workdir")
    arguments = parser.parse_args(argv)
    lengths = whole_numbers(arguments.lengths, "--lengths") if arguments.lengths else []
    out = arguments.out or arguments.workdir / "results.jsonl"
    results = evaluate(arguments.workdir, arguments.split, lengths)
    append_jsonl(out, results)
    for result in results:
        word = f" {result['word_perplexity']:.1f} a word," if "word_perplexity" in result else ""
        accuracy = f"accuracy {result['accuracy']:.2%} " if "accuracy" in result else ""
        masked = " masked" if result["task"] == "masked_lm" else ""
        print(
            f"{result['family']} {result['split']} at length {result['length']}, step {result['step']}: "
            f"perplexity {result['perplexity']:.3f} a{masked} token,{word} {result['bits_per_byte']:.4f} bits a byte, "
            f"{accuracy}"
            f"over {result['tokens']:.0f}{masked} tokens"
        )


if __name__ == "__main__":
    run(main)
