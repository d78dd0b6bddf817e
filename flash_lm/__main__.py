"""python -m flash_lm COMMAND …, which is also installed as flash-lm."""

import importlib
import sys

from flash_lm.cli.run import run

COMMANDS = {
    "train": "train a config, or resume its run",
    "launch": "start a command again when it has crashed or lost a host",
    "evaluate": "score a checkpoint",
    "export": "write a checkpoint as safetensors, with a model card",
    "import_model": "convert a Llama from Hugging Face's format",
    "convert": "take over the weights of a model in another family",
    "linearise": "make a pretrained Transformer linear: transfer, then distillation",
    "generate": "continue a prompt, or fill in masks",
    "translate": "answer all first texts of a split of pairs, and score the answers: BLEU",
    "harness": "score a checkpoint on tasks of the lm-evaluation-harness",
    "sweep": "train and score the runs of a grid or a study",
    "track": "replay runs' metrics into trackio or wandb",
    "serve": "serve a checkpoint: a web page and a JSON API",
}


def main() -> None:
    """Runs a command, as python -m flash_lm.COMMAND does."""
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print("usage: flash-lm COMMAND …   (see flash-lm COMMAND --help)", file=sys.stderr)
        print("\n".join(f"  {name:<12} {what}" for name, what in COMMANDS.items()), file=sys.stderr)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    command = importlib.import_module(f"flash_lm.{sys.argv.pop(1)}")
    run(command.main, command.flags)


if __name__ == "__main__":
    main()
