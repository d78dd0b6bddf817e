"""Fine-tunes an imported chat model on text and on chats, and scores it before and after.

    python -m benchmarks.pretrained.finetune --model=runs/smol/smollm2 \
        --out=benchmarks/pretrained/results/finetune.jsonl

Each run is the command that a user would type, in a process of its own, with all parameters or with those of attention
and norms alone; `own_data` has the data. The losses are of held-out data, in nats a token, before and after; those of
chats count the tokens of the answers alone. `prose_loss_…` are of English text that no run trains on.

A run is a success (written before the measured runs) if
- on text, the held-out loss falls by at least 3 %; on chats, the held-out loss falls to at most a half, and both
  held-out questions are answered in the voice that the chats have;
- the loss on prose rises by at most 5 %;
- it takes at most ten minutes on two cores, with the start of the process.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence

import jax

import flash_lm
from benchmarks.pretrained.own_data import in_voice, write_chats, write_prose, write_sources
from flash_lm.cli.compile_cache import keep_compiled
from flash_lm.cli.huge_pages import user_environment
from flash_lm.cli.run import run
from flash_lm.cli.types import any_path, parse_integers, positive
from flash_lm.errors import RunError
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import Line, append_jsonl, read_jsonl
from flash_lm.runs.provenance import provenance
from flash_lm.training.frozen import frozen_mask

TEXT_LOSS, CHAT_LOSS, PROSE_LOSS = 0.97, 0.5, 1.05  # largest shares of the loss before
MOST_SECONDS = 600
ATTENTION = ("embedding", "(gate|up|down)/kernel")  # what stays fixed where attention and norms alone are trained
FREEZE: dict[str, tuple[str, ...]] = {"all": (), "attention": ATTENTION}
TEXT_LENGTH, CHAT_LENGTH = 128, 64  # tokens per row
CHATS, WARM_UP = 200, 3  # chats for all splits; steps that are left out of the median
# None of the training data: the numbers of a sum are elsewhere at most 49 and at least 50.
QUESTIONS = ("What is 12 plus 13?", "I have 101 apples and buy 7 more. How many do I have?", "Who wrote Hamlet?")


@dataclasses.dataclass(frozen=True)
class Data:
    """What a run trains on.

    Attributes:
        preset: text or chat.
        path: the folder of its files.
        learning_rate: the peak.
        length: tokens per row.
    """

    preset: str
    path: pathlib.Path
    learning_rate: float
    length: int


def text_data(folder: pathlib.Path) -> Data:
    """Python's own sources, written to a folder."""
    write_sources(folder)
    return Data("text", folder, 1e-4, TEXT_LENGTH)


def chat_data(folder: pathlib.Path, seed: int) -> Data:
    """Chats that are drawn with a seed, written to a folder."""
    write_chats(folder, CHATS, seed)
    return Data("chat", folder, 1e-4, CHAT_LENGTH)


class Benchmark:
    """The model before training, the settings of all runs, and a place for them."""

    def __init__(self, model: str, folder: pathlib.Path, steps: int, tokens: int):
        """Takes the folder of the model, one for runs and data, the steps of a run and the tokens of a step."""
        self._model, self._folder, self._steps, self._tokens = model, folder, steps, tokens
        self._before = flash_lm.load(model)
        self._answers = self._ask(self._before)
        self._prose = folder / "prose.txt"
        write_prose(self._prose)
        self._prose_loss = self._score_prose(model)

    def lines(self, data: Data, seed: int, trained: Sequence[str]) -> Iterator[Line]:
        """Trains on data with each of these keys of `FREEZE`, and yields a line for each."""
        before = self._score(self._model, data)
        for name in trained:
            yield self._line(data, seed, name, before)

    def _line(self, data: Data, seed: int, trained: str, before: float) -> Line:
        # Train in a process of its own, and read the times of its log. The states of all runs would be gigabytes.
        workdir = self._folder / "run"
        shutil.rmtree(workdir, ignore_errors=True)
        seconds, peak = _run_command(self._command(data, seed, trained, workdir))
        log = [x for x in read_jsonl(workdir / "metrics.jsonl") if "step_ms" in x]
        frozen = jax.tree.leaves(frozen_mask(FREEZE[trained], self._before.params))
        sizes = [x.size for x in jax.tree.leaves(self._before.params)]
        line: Line = {
            "data": data.preset,
            "trained": trained,
            "freeze": FREEZE[trained],
            "seed": seed,
            "parameters": sum(sizes),
            "trained_parameters": sum(size for size, is_frozen in zip(sizes, frozen, strict=True) if not is_frozen),
            "length": data.length,
            "tokens_per_step": self._tokens,
            "steps": self._steps,
            "learning_rate": data.learning_rate,
            "step_s": statistics.median(x["step_ms"] for x in log[WARM_UP:] or log) / 1000,
            "first_step_s": log[0]["first_step_s"],
            "total_s": seconds,
            "peak_rss_bytes": peak,
            "loss_before": before,
            "loss_after": self._score(str(workdir), data),
            "prose_loss_before": self._prose_loss,
            "prose_loss_after": self._score_prose(str(workdir)),
        }
        if data.preset == "chat":
            after = self._ask(flash_lm.load(workdir))
            line["answers"] = [
                {"question": question, "before": old, "after": new}
                for question, old, new in zip(QUESTIONS, self._answers, after, strict=True)
            ]
        return line | {"success": not failures(line), "failures": failures(line)}

    def _command(self, data: Data, seed: int, trained: str, workdir: pathlib.Path) -> list[str]:
        keys = {
            "seed": seed,
            "data.path": data.path,
            "data.length": data.length,
            "data.tokens_per_batch": self._tokens,
            "train.steps": self._steps,
            "train.learning_rate": data.learning_rate,
            "train.eval_every": 0,
            "train.checkpoint_every": 0,
            "train.log_every": 1,
            "train.freeze": FREEZE[trained],
        }
        words = [f"--config={self._model}:{data.preset}", f"--workdir={workdir}"]
        return ["flash_lm.train", *words, *(f"--config.{key}={value}" for key, value in keys.items())]

    def _score(self, model: str, data: Data) -> float:
        """The loss on the test split, in rows as long as those of training."""
        return self._loss(model, data.preset, data.path, "test", data.length)

    def _score_prose(self, model: str) -> float:
        """The loss on prose, in rows as long as those of the text."""
        return self._loss(model, "text", self._prose, "whole", TEXT_LENGTH)

    def _loss(self, model: str, preset: str, path: pathlib.Path, split: str, length: int) -> float:
        pack = "examples" if preset == "chat" else "stream"
        words = [f"corpus={preset}", f"path={path}", f"pack={pack}"]
        (line,) = evaluate(model, split, [length], overrides=[f"--config.data.{word}" for word in words])
        return line["loss"]

    def _ask(self, model: flash_lm.LoadedModel) -> list[str]:
        """The likeliest answer to each question."""
        chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
        return [model.chat(chat, max_tokens=40, temperature=0) for chat in chats]


def failures(line: Line) -> list[str]:
    """The conditions of a success that a line does not meet."""
    largest = {"text": TEXT_LOSS, "chat": CHAT_LOSS}[line["data"]]
    conditions = {
        "loss": line["loss_after"] <= largest * line["loss_before"],
        "prose": line["prose_loss_after"] <= PROSE_LOSS * line["prose_loss_before"],
        "time": line["total_s"] <= MOST_SECONDS,
        # The last question is of another kind, which the chats say nothing on.
        "voice": all(in_voice(one["after"]) for one in line.get("answers", ())[:-1]),
    }
    return [name for name, is_met in conditions.items() if not is_met]


def _run_command(words: list[str]) -> tuple[float, int]:
    """Runs a command; returns its seconds and the largest resident memory of its process, in bytes."""
    environment = user_environment()
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [os.getcwd(), environment.get("PYTHONPATH")]))
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen([sys.executable, "-m", *words], env=environment, stdout=errors, stderr=errors)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            errors.seek(0)
            raise RunError(f"{' '.join(words)} failed:\n{errors.read()}")
    return time.perf_counter() - start, usage.ru_maxrss * 1024


def main(argv: list[str]) -> None:
    """Appends a JSON line for each run to OUT, when it ends."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrained.finetune", description=main.__doc__)
    parser.add_argument("--model", required=True, help="the folder of an imported model with a chat template")
    parser.add_argument("--data", default="text chat", help="text, chat or both")
    parser.add_argument("--trained", default=" ".join(FREEZE), help="all, attention or both")
    parser.add_argument("--seeds", default="1,2,3", help="of the chats and their runs; text takes the first")
    parser.add_argument("--steps", type=positive, default=16)
    parser.add_argument("--tokens", type=positive, default=512, help="of a step")
    parser.add_argument("--out", required=True, type=any_path)
    arguments = parser.parse_args(argv)
    keep_compiled()
    seeds = parse_integers(arguments.seeds, "--seeds")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        benchmark = Benchmark(arguments.model, folder, arguments.steps, arguments.tokens)
        asked: list[tuple[Data, int]] = []
        if "chat" in arguments.data.split():
            asked += [(chat_data(folder / f"chat_{seed}", seed), seed) for seed in seeds]
        if "text" in arguments.data.split():
            asked.insert(1, (text_data(folder / "text"), seeds[0]))
        for data, seed in asked:
            for line in benchmark.lines(data, seed, arguments.trained.split()):
                append_jsonl(arguments.out, [line | provenance(jax.devices()[0].device_kind)])
                print(
                    f"{line['data']}, {line['trained']}, seed {seed}: loss {line['loss_before']:.3f} -> "
                    f"{line['loss_after']:.3f}, prose {line['prose_loss_before']:.3f} -> "
                    f"{line['prose_loss_after']:.3f}, {line['step_s']:.2f} s a step, {line['total_s']:.0f} s; "
                    + ("success" if line["success"] else f"failed: {', '.join(line['failures'])}"),
                    flush=True,
                )


if __name__ == "__main__":
    run(main)
