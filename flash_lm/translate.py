"""flash-lm translate --workdir=runs/pairs [--split=test] [--beams=4] [--answers=answers.jsonl]."""

import argparse
import dataclasses
import importlib.util

from flash_lm.cli.flags import add_run_flags, parse_run, results_file
from flash_lm.cli.run import run
from flash_lm.cli.types import any_path, local_path, positive
from flash_lm.errors import missing_package
from flash_lm.inference.settings import BeamSearch
from flash_lm.runs.jsonl import append_jsonl, write_jsonl

_TOKENIZERS = ("13a", "intl", "zh", "char", "none")


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(prog="flash-lm translate", description=main.__doc__)
    add_run_flags(parser)
    search = BeamSearch()
    parser.add_argument("--split", default="test", help="train, validation or test; default: test")
    parser.add_argument("--pairs", type=positive, help="number of pairs; default: all")
    parser.add_argument("--beams", type=int, default=search.beams, help="1: greedy decoding; default: %(default)s")
    parser.add_argument(
        "--length_penalty",
        type=float,
        default=search.length_penalty,
        help="0 ranks answers by probability, more prefers longer ones; default: %(default)s",
    )
    parser.add_argument("--max_tokens", type=positive, help="of an answer; default: the sequence length of training")
    parser.add_argument(
        "--tokenize", default="13a", choices=_TOKENIZERS, help="how BLEU splits texts into words; default: %(default)s"
    )
    parser.add_argument("--answers", type=local_path, help="a JSONL file for pairs and answers")
    parser.add_argument("--results", type=any_path, help="a JSONL file; default: bleu.jsonl in the run's folder")
    return parser


def main(argv: list[str]) -> None:
    """Answers the first texts of a split of pairs by beam search, and scores the answers: BLEU, chrF, share of equals.

    --config.data.KEY=VALUE selects pairs other than the run's own.
    """
    arguments, overrides = flags().parse_known_args(argv)
    settings = BeamSearch(arguments.beams, arguments.length_penalty)
    if importlib.util.find_spec("sacrebleu") is None:
        raise missing_package("sacrebleu", "bleu")
    from flash_lm.inference.model import load_model
    from flash_lm.inference.scoring import load_text
    from flash_lm.inference.translation import compute_scores, translate
    from flash_lm.runs.hosts import is_first
    from flash_lm.runs.lost_hosts import report_lost_host

    # The model, and the split of pairs to translate.
    name, mesh = parse_run(arguments)
    out = results_file(arguments, name, "bleu.jsonl")
    trained = load_model(name, mesh_shape=mesh, overrides=overrides)
    corpus = load_text(trained, arguments.split)
    # Every host translates its share.
    with report_lost_host():
        limits = {"first": arguments.pairs, "max_tokens": arguments.max_tokens}
        translations = translate(trained, corpus, arguments.split, settings, **limits)
    if not is_first():
        return
    # The first host writes answers and scores.
    if arguments.answers:
        arguments.answers.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(arguments.answers, [dataclasses.asdict(one) for one in translations])
    about = {"run": trained.name, "step": trained.step, "family": trained.config.model.label, "corpus": corpus.name}
    scores = compute_scores(translations, arguments.tokenize)
    append_jsonl(out, [about | {"split": arguments.split, **dataclasses.asdict(settings), **limits, **scores}])
    print(
        f"{about['family']} on {corpus.name} {arguments.split}, step {trained.step}, {settings.beams} beams: BLEU "
        f"{scores['bleu']:.2f}, chrF {scores['chrf']:.2f}, {scores['exact']:.2%} equal, over {scores['pairs']} pairs\n"
        f"BLEU {scores['bleu_signature']}"
    )


if __name__ == "__main__":
    run(main, flags)
