"""flash-lm linearise --model=runs/smol/smollm2 --workdir=runs/smol/linear --config.data.path=mine …."""

import argparse
import logging
from typing import Any

from flash_lm.cli.flags import add_begin_flags, begin
from flash_lm.cli.load import given_keys, load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import count, local_path, positive
from flash_lm.errors import InputError
from flash_lm.linearising.stages import STAGES

_FAMILY = "window_linear"
# Rows of several windows, one evaluation a stage.
_DEFAULTS = ("--config.data.length=512", "--config.data.tokens_per_batch=4096", "--config.train.eval_every=0")

# Keys that the stages set, and what to use in their place.
_OF_STAGES = {
    "model.pattern": "--softmax_layers",
    "train.init_from": "--model",
    "train.teacher": "--model",
    "train.teacher_loss": "the stages as they are",
    "train.steps": "--transfer_tokens, --distil_tokens and --plain_tokens",
    "train.tokens": "--transfer_tokens, --distil_tokens and --plain_tokens",
    "train.learning_rate": "--transfer_rate, --distil_rate and --plain_rate",
    "train.freeze": "the stages as they are",
}


def flags() -> argparse.ArgumentParser:
    """Returns the command's argument parser."""
    parser = argparse.ArgumentParser(
        prog="flash-lm linearise",
        description=main.__doc__,
        epilog=f"--config.KEY=VALUE sets a key of the student and of all stages, such as --config.data.path=mine; the "
        f"family is {_FAMILY} unless --config.model.family says another.",
    )
    parser.add_argument("--model", required=True, help="the teacher: a run, an export or an imported model")
    parser.add_argument("--workdir", required=True, type=local_path, help="folder of all stages")
    parser.add_argument("--softmax_layers", type=int, help="layers that stay softmax; default: a fifth of them")
    parser.add_argument(
        "--importance_rows", type=positive, default=8, help="sequences to compare layers on; default: 8"
    )
    for name, stage in STAGES.items():
        parser.add_argument(
            f"--{name}_tokens",
            type=_tokens,
            default=stage.tokens,
            metavar="TOKENS",
            help=f"{stage.about}; such as 2M, 0: leave the stage out; default: {stage.tokens:,}",
        )
        parser.add_argument(
            f"--{name}_rate", type=float, default=stage.rate, metavar="RATE", help=f"default: {stage.rate}"
        )
    parser.add_argument(
        "--plan",
        nargs="?",
        const="",
        metavar="CHIP[:COUNT]",
        help="print tokens, memory and estimated hours of each stage on these devices, such as H200 (alone: on this "
        "machine's), and end; nothing is trained or written",
    )
    add_begin_flags(parser)
    return parser


def main(argv: list[str]) -> None:
    """Makes a pretrained Transformer linear: transfer layer by layer, then distillation; run it again to resume."""
    arguments, overrides = flags().parse_known_args(argv)
    from flash_lm.linearising.linearise import Linearisation, linearise
    from flash_lm.runs.hosts import is_first
    from flash_lm.runs.lost_hosts import report_lost_host
    from flash_lm.training.hub import download
    from flash_lm.training.interrupt import stop_on_signal

    given = given_keys(overrides)
    if wrong := sorted(given & _OF_STAGES.keys()):
        raise InputError.of(f"--config.{key} is set by the stages: use {_OF_STAGES[key]}" for key in wrong)
    if arguments.plan is not None and arguments.hosts:
        raise InputError("--plan is made by one process: leave --hosts out, and give --plan=CHIP:COUNT")
    family = [] if given & {"model.family"} else [f"--config.model.family={_FAMILY}"]
    config: Any = load_config(f"{download(arguments.model).workdir}:text", [*_DEFAULTS, *family, *overrides])
    layers = config.model.num_layers // 5 if arguments.softmax_layers is None else arguments.softmax_layers
    if not 0 <= layers < config.model.num_layers:
        raise InputError(f"--softmax_layers={layers} must be from 0 to {config.model.num_layers - 1}, fewer than all")
    asked = Linearisation(
        model=arguments.model,
        workdir=arguments.workdir,
        config=config,
        given=frozenset(given | {"model.family"}),
        softmax_layers=layers,
        rows=arguments.importance_rows,
        tokens={name: getattr(arguments, f"{name}_tokens") for name in STAGES},
        rates={name: getattr(arguments, f"{name}_rate") for name in STAGES},
    )
    if arguments.plan is not None:
        return _print_plan(asked, arguments.plan)
    begin(arguments)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # else every stage would log the corpus
    with report_lost_host(), stop_on_signal() as should_stop:
        last = linearise(asked, should_stop)
    if is_first():
        print(f"{last}: a --workdir for evaluate, generate, serve and export")


def _tokens(word: str) -> int:
    return 0 if word == "0" else count(word)


def _print_plan(asked: Any, target: str) -> None:
    from flash_lm.cli.compile_cache import compile_without_cache
    from flash_lm.cli.plan_text import plan_text
    from flash_lm.linearising.linearise import stage_configs
    from flash_lm.training.plan import make_plan, parse_target, plan_config

    compile_without_cache()
    devices = parse_target(target)
    for name, config in stage_configs(asked).items():
        print(f"{name}: {STAGES[name].about}")
        print(
            plan_text(make_plan(plan_config(config, asked.workdir / "plan" / name, devices.count), devices)), end="\n\n"
        )


if __name__ == "__main__":
    run(main, flags)
