"""flash-lm COMMAND …, or python -m flash_lm COMMAND …: the table of commands, and the way to each."""

import argparse
import contextlib
import importlib
import sys
from collections.abc import Sequence

from flash_lm.cli.run import run
from flash_lm.errors import nearest

# What each command does, by the name of its module, which python -m flash_lm.NAME runs as well.
COMMANDS = {
    "demo": "train three small models, and show where each of them wins",
    "train": "train a config, or resume its run",
    "launch": "start a command again when it has crashed or lost a host",
    "sweep": "train and score the runs of a grid or a study, perhaps with several seeds",
    "evaluate": "score a checkpoint",
    "compare": "compare runs: a table, curves against steps, time and FLOPs, a page",
    "recall": "compare attentions on associative recall",
    "reproduce": "train, score and time the runs of a table of the papers",
    "scaling": "plan the runs of a scaling law, and fit it",
    "harness": "score a checkpoint on tasks of the lm-evaluation-harness",
    "positions": "perplexity by position in the document: a table and a plot",
    "attention_maps": "draw a run's attention weights",
    "generate": "continue a prompt, or fill in masks",
    "generate_images": "draw images with a run trained on images",
    "translate": "answer all first texts of a split of pairs, and score the answers: BLEU",
    "serve": "serve a checkpoint: a web page and a JSON API",
    "import_model": "convert a model of another library's format",
    "export": "write a checkpoint as safetensors, with a model card",
    "convert": "take over the weights of a model in another family",
    "linearise": "make a pretrained Transformer linear: transfer, then distillation",
    "track": "replay runs' metrics into trackio or wandb",
    "keys": "list keys of a config, with their defaults and meanings",
    "list": "list families, configs, tasks, corpora, optimizers, heads or formats",
}
_SHORT = {"import": "import_model"}  # names that Python keeps for itself


def main() -> None:
    """Runs a command, as python -m flash_lm.COMMAND does."""
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    name = module_name(word)
    if name in COMMANDS:
        command = importlib.import_module(f"flash_lm.{name}")
        sys.argv.pop(1)
        run(command.main, command.flags)
    elif word in ("--version", "-V"):
        print(f"flash_lm {_version()}")
    elif word == "--completion":
        with contextlib.suppress(BrokenPipeError):
            print(_completion(sys.argv[2:]), flush=True)
    elif word in ("-h", "--help"):
        print(_usage())
    else:
        near = nearest(word, [*map(spelt, COMMANDS), *_SHORT])
        advice = f"did you mean flash-lm {near}?" if near else "flash-lm --help lists the commands"
        print(f"error: no command {word}: {advice}" if word else _usage(), file=sys.stderr)
        sys.exit(2)


def module_name(word: str) -> str:
    """The module of a command as it is typed: import_model for import."""
    return _SHORT.get(word, word.replace("-", "_"))


def spelt(name: str) -> str:
    """A command as it is typed: import, attention-maps."""
    return next((short for short, long in _SHORT.items() if long == name), name.replace("_", "-"))


def _usage() -> str:
    lines = [f"  {spelt(name):<16} {what}" for name, what in COMMANDS.items()]
    more = "flash-lm COMMAND --help lists a command's flags, flash-lm --version the version;\n"
    more += 'eval "$(flash-lm --completion bash)" completes words in a shell (bash, zsh or tcsh)'
    return "\n".join(["usage: flash-lm COMMAND …", *lines, more])


def _version() -> str:
    import importlib.metadata  # noqa: PLC0415 (slow to import)

    return importlib.metadata.version("flash_lm")


def _completion(words: Sequence[str]) -> str:
    """The shell's script that completes commands and flags."""
    import shtab  # noqa: PLC0415 (only this needs it)

    shell = argparse.ArgumentParser(prog="flash-lm --completion")
    shell.add_argument("shell", choices=shtab.SUPPORTED_SHELLS)
    chosen = shell.parse_args(words).shell
    parser = argparse.ArgumentParser(prog="flash-lm")
    commands = parser.add_subparsers()
    for name, what in COMMANDS.items():
        flags = importlib.import_module(f"flash_lm.{name}").flags()
        commands.add_parser(spelt(name), help=what, parents=[flags], add_help=False)
    return shtab.complete(parser, shell=chosen)


if __name__ == "__main__":
    main()
