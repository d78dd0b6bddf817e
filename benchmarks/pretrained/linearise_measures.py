"""Measures a model beside the teacher that it was made from: likelihood, needles, free generation, speed.

    python -m benchmarks.pretrained.linearise_measures --model=FOLDER --teacher=FOLDER --data=DIR --out=lines.jsonl

DIR has the folders wiki and books, each with validation.parquet and test.parquet; all text is held out. The model has
the teacher's tokenizer. A line for each measure is appended when it is done:
- layers: the relative error of each layer's token mixer, and the share of its linear part; not with model.pattern;
- likelihood: perplexity, divergence from the teacher and agreement with it, in all and by position;
- needle: codes that are found in long text, by depth;
- generation: continuations of text, beside the teacher's and under the teacher;
- questions: closed questions that are answered with the right word, in the chat form;
- speed: decoded tokens a second and the bytes of the state.
"""

import argparse
from collections.abc import Callable, Iterator

import jax

import flash_lm
from benchmarks.pretrained.decode_speed import measure_speed
from benchmarks.pretrained.free_generation import measure_generation, measure_questions
from benchmarks.pretrained.held_out import TEXTS, HeldOut
from benchmarks.pretrained.layer_errors import measure_layers
from benchmarks.pretrained.likelihood import measure_likelihood
from benchmarks.pretrained.needles import NeedleTest
from flash_lm.cli.compile_cache import keep_compiled
from flash_lm.cli.run import run
from flash_lm.cli.types import any_path, local_path, parse_integers, positive, split_words
from flash_lm.errors import InputError
from flash_lm.inference.model import TrainedModel
from flash_lm.runs.jsonl import Line, append_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.training.checkpoint_read import identity

Flags = argparse.Namespace
NEEDLE_TEXT = "books"  # the longest documents


def _likelihood(model: TrainedModel, teacher: TrainedModel, flags: Flags) -> Iterator[Line]:
    for text in _texts(flags):
        for pair in split_words(flags.rows):
            length, rows = parse_integers(pair.replace("x", " "), "--rows")
            yield measure_likelihood(model, teacher, text, rows, length)


def _layers(model: TrainedModel, teacher: TrainedModel, flags: Flags) -> Iterator[Line]:
    for text in _texts(flags):
        length, rows = parse_integers(flags.layer_rows.replace("x", " "), "--layer_rows")
        yield measure_layers(model, teacher, text, rows, length)


def _needle(model: TrainedModel, teacher: TrainedModel, flags: Flags) -> Iterator[Line]:
    test = NeedleTest(model, HeldOut(flags.data, NEEDLE_TEXT, flags.split), flags.codes)
    for length in parse_integers(flags.needle_lengths, "--needle_lengths"):
        yield test(length, flags.needles)


def _generation(model: TrainedModel, teacher: TrainedModel, flags: Flags) -> Iterator[Line]:
    yield from measure_generation(model, teacher, _texts(flags), flags.prompts, flags.new_tokens)


def _questions(model: TrainedModel, teacher: TrainedModel, flags: Flags) -> Iterator[Line]:
    yield measure_questions(model)


def _speed(model: TrainedModel, teacher: TrainedModel, flags: Flags) -> Iterator[Line]:
    for context in parse_integers(flags.contexts, "--contexts"):
        for rows in parse_integers(flags.speed_rows, "--speed_rows"):
            yield measure_speed(model, context, rows, flags.turns)


MEASURES: dict[str, Callable[[TrainedModel, TrainedModel, Flags], Iterator[Line]]] = {
    "layers": _layers,
    "likelihood": _likelihood,
    "needle": _needle,
    "generation": _generation,
    "questions": _questions,
    "speed": _speed,
}


def _texts(flags: Flags) -> list[HeldOut]:
    return [HeldOut(flags.data, text, flags.split) for text in TEXTS]


def about(model: TrainedModel, teacher: TrainedModel) -> Line:
    """What every line says of the two models: names, sizes and fingerprints of the parameters.

    Raises:
        InputError: they have different tokenizers.
    """
    if model.tokenizer.fingerprint != teacher.tokenizer.fingerprint:
        raise InputError(f"{model.name} and {teacher.name} have different tokenizers: give the model's own teacher")
    params = {one: identity(one.run, one.folder, one.step, one.params, one.facts)["params"] for one in {model, teacher}}
    return {
        "model": model.name,
        "family": model.config.model.label,
        "parameters": model.model.parameter_count(),
        "params": params[model],
        "config_hash": model.folder.hash,
        "teacher": teacher.name,
        "teacher_params": params[teacher],
    }


def main(argv: list[str]) -> None:
    """Appends a JSON line for each measure to OUT; --config.… changes how the model is computed, as of evaluate."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pretrained.linearise_measures", description=main.__doc__
    )
    parser.add_argument("--model", required=True, help="the folder of the model to measure")
    parser.add_argument("--teacher", required=True, help="the folder of the model that it was made from; may be equal")
    parser.add_argument("--data", required=True, type=local_path, help="the folder with wiki/ and books/")
    parser.add_argument("--split", default="test", choices=("validation", "test"), help="of the texts")
    parser.add_argument(
        "--only", default=" ".join(name for name in MEASURES if name != "layers"), help=f"some of {', '.join(MEASURES)}"
    )
    parser.add_argument("--rows", default="512x16 2048x4", help="likelihood: length x number of rows of each text")
    parser.add_argument("--layer_rows", default="1024x4", help="layers: length x number of rows of each text")
    parser.add_argument("--needle_lengths", default="1024 2048 4096", help="needle: tokens of a row")
    parser.add_argument("--needles", type=positive, default=20, help="needle: rows of each length")
    parser.add_argument("--codes", type=positive, default=1, help="needle: in each row, one of which is asked for")
    parser.add_argument("--prompts", type=positive, default=32, help="generation: of each text, decoded at once")
    parser.add_argument("--new_tokens", type=positive, default=128, help="generation: after each prompt")
    parser.add_argument("--contexts", default="1024 8192", help="speed: tokens")
    parser.add_argument("--speed_rows", default="1 8", help="speed: sequences that are decoded at once")
    parser.add_argument("--turns", type=positive, default=5, help="speed: whose median is taken")
    parser.add_argument("--out", required=True, type=any_path)
    flags, overrides = parser.parse_known_args(argv)
    if (unknown := sorted(set(asked := split_words(flags.only)) - MEASURES.keys())) or not asked:
        raise InputError(f"--only: {', '.join(unknown) or 'nothing'} must be among {', '.join(MEASURES)}")

    # The teacher by itself is loaded once.
    keep_compiled()
    model = flash_lm.load(flags.model, overrides=overrides)
    teacher = model if flags.teacher == flags.model else flash_lm.load(flags.teacher)
    both = about(model, teacher)
    for name in (name for name in MEASURES if name in asked):
        for line in MEASURES[name](model, teacher, flags):
            append_jsonl(flags.out, [{"measure": name} | both | line | provenance(jax.devices()[0].device_kind)])
            numbers = {key: round(x, 4) for key, x in line.items() if isinstance(x, int | float)}
            print(name, line.get("text", ""), *(f"{key}={x}" for key, x in numbers.items()), flush=True)


if __name__ == "__main__":
    run(main)
