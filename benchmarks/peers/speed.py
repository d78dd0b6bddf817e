"""Times our training step and those of other libraries, in turns: same shape, precision and number of parameters.

    make peers
    python -m benchmarks.peers.speed --out=benchmarks/peers/results/sdpa [--peers=sdpa --lengths="512 2048" …]

A peer runs in a separate environment (requirements-peers.txt), in a process that waits during our turn. A step is
forward, backward, clipping and AdamW of the same number of tokens, which are on the device. Both sides run in the
fastest of a few forms, each tried for some steps: the peer's by torch.compile, PyTorch's own model with each form of
its attention that works, ours with its layers scanned and unrolled. Neither recomputes activations, unless
--config.model.remat says so of ours. On a CPU both have the same number of threads, and an allocator that keeps memory,
unless the environment has other settings, as in GLIBC_TUNABLES=glibc.malloc.hugetlb=0. Compilation is not timed.
"""

import argparse
import dataclasses
import json
import logging
import math
import os
import pathlib
import subprocess
import time
from typing import Any

import jax
from ml_collections import ConfigDict

from benchmarks.lib.allocator import chosen_settings, keep_memory
from benchmarks.lib.peers import MOST_UNEQUAL, add_python, check_python, peer_shape
from flash_lm.cli.huge_pages import user_environment
from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.cli.types import parse_integers, positive, split_words
from flash_lm.config.experiment import Config
from flash_lm.config.model import DTYPES
from flash_lm.errors import InputError
from flash_lm.report.figure import can_draw
from flash_lm.report.markdown import markdown_table
from flash_lm.report.panels import Panel, plot_panels
from flash_lm.runs.jsonl import Line, append_jsonl
from flash_lm.runs.provenance import cpu_threads
from flash_lm.timing.bare_step import BareStep, step_config
from flash_lm.timing.machine import machine, machines
from flash_lm.timing.turns import ROUNDS, Cell, make_turn, take_turns
from flash_lm.training.chips import peak_flops
from flash_lm.training.train_state import ModelFunction

# peer -> our config keys of the same model
PEERS: dict[str, dict[str, Any]] = {
    "sdpa": {"family": "transformer"},
    "flash_pytorch": {"family": "flash", "tie_embeddings": False},
    "fast_transformers": {"family": "linear_transformer"},
    "flash_linear_attention": {"family": "linear_transformer", "absolute_positions": "none"},
}
# Forms of our step, by the fields of the model.
FORMS: dict[str, dict[str, Any]] = {"scanned": {"scan_layers": True}, "unrolled": {"scan_layers": False}}
TRIED = 3  # steps by which the fastest form is chosen
WORKER = pathlib.Path(__file__).with_name("speed_worker.py")
COLUMNS = {
    "peer": ("peer", "{}"),
    "compiled": ("peer_compiled", "{}"),
    "its attention": ("peer_attention", "{}"),
    "ours": ("family", "{}"),
    "our layers": ("form", "{}"),
    "length": ("length", "{:,}"),
    "ours, ms": ("ours_ms", "{:,.0f}"),
    "peer's, ms": ("peer_ms", "{:,.0f}"),
    "times as fast": ("speedup", "{:.2f}"),
    "on": ("machine", "{}"),
    "our threads": ("threads", "{:.0f}"),
    "their threads": ("peer_threads", "{:.0f}"),
    "our parameters": ("params", "{:,}"),
    "peer's": ("peer_params", "{:,}"),
    "": ("not_compared", "{}"),
}


class PeerError(Exception):
    """An error that a peer returned instead of an answer."""


def start_peer(name: str, python: pathlib.Path, worker: pathlib.Path | None = None) -> subprocess.Popen:
    """Starts the process of a peer, which ends when its input ends.

    Args:
        name: the peer.
        python: the peers' interpreter.
        worker: its program; None: that of this benchmark.
    """
    # Threads that spin while they wait would use cores during our turn.
    environment = user_environment() | {"OMP_WAIT_POLICY": "PASSIVE"}
    pipe = subprocess.PIPE
    return subprocess.Popen([python, worker or WORKER, name], env=environment, stdin=pipe, stdout=pipe, bufsize=0)


def ask(peer: subprocess.Popen, question: Line) -> Line:
    """Sends a question to a peer and returns its answer.

    Raises:
        PeerError: the peer returned an error or ended.
    """
    assert peer.stdin and peer.stdout
    try:
        peer.stdin.write(json.dumps(question).encode() + b"\n")
        answer = json.loads(peer.stdout.readline())
    except (BrokenPipeError, ValueError) as error:
        peer.kill()  # it may be alive, but have printed something else
        raise PeerError(f"its process ended with code {peer.wait()}") from error
    if "error" in answer:
        raise PeerError(answer["error"])
    return answer


def compare(name: str, config: Config, peer: subprocess.Popen, rounds: int, end: float = math.inf) -> Line:
    """Returns a line with the step times of both sides and their forms, or why they are not compared.

    Args:
        name: the peer.
        config: our config.
        peer: its process.
        rounds: see `take_turns`.
        end: when `time.perf_counter` is there, no further form is tried.
    """
    line: Line = {"peer": name, "family": config.model.family, "length": config.data.length}
    line |= {"params": ModelFunction(config.model, config.seed).parameter_count(), "remat": config.model.remat}
    try:
        left = None if end == math.inf else end - time.perf_counter()
        about = ask(peer, {"build": peer_shape(config), "seconds": left})
        line |= {f"peer_{key}": value for key, value in about.items()}
        if "why_eager" in about:
            print(f"{line['peer']} runs eagerly: {about['why_eager']}", flush=True)
        unequal = abs(about["params"] / line["params"] - 1)
        if unequal > MOST_UNEQUAL:
            return line | {"not_compared": f"the numbers of parameters differ by {unequal:.1%}"}
        theirs = Cell.warm_up("peer", lambda: ask(peer, {"turn": 1})["ms"])
        step, facts = fastest_form(config, end)
        line |= facts
        ours = Cell.warm_up("ours", make_turn(step.step))
        take_turns([ours, theirs], rounds)
    except PeerError as error:
        return line | {"not_compared": str(error)}
    except jax.errors.JaxRuntimeError as error:  # such as no memory
        return line | {"not_compared": f"ours: {error}".splitlines()[0][:200]}
    peak = peak_flops(jax.devices()[0].device_kind, config.model.dtype)
    for side, cell in (("ours", ours), ("peer", theirs)):
        line |= {f"{side}_ms": cell.median_ms, f"{side}_iqr_ms": cell.iqr_ms, f"{side}_turns": len(cell.times_ms)}
        if peak:
            line[f"{side}_peak_fraction"] = step.model_flops / (cell.median_ms / 1000) / peak
    return line | {"speedup": theirs.median_ms / ours.median_ms}


def fastest_form(config: Config, end: float) -> tuple[BareStep, Line]:
    """Returns our step in the form with the fastest step, started, and the facts about it for the line.

    Args:
        config: our config; its own form is tried first.
        end: when `time.perf_counter` is there, no further form is tried.

    Raises:
        JaxRuntimeError: none of them runs.
    """
    is_own = lambda form: all(getattr(config.model, key) == value for key, value in FORMS[form].items())
    fastest, chosen, times, failed = None, "", {}, []
    for form in sorted(FORMS, key=is_own, reverse=True):
        if fastest and time.perf_counter() > end:
            break
        try:
            step = BareStep(dataclasses.replace(config, model=dataclasses.replace(config.model, **FORMS[form])))
            step.start()
            turn = make_turn(step.step)
            turn()
            times[form] = min(turn() for _ in range(TRIED))
        except jax.errors.JaxRuntimeError as error:  # such as no memory
            failed.append(error)
            continue
        if times[form] == min(times.values()):
            fastest, chosen = step, form
    if fastest is None:
        raise failed[0]
    facts = {"form": chosen, "form_ms": times, "kernels": fastest.kernels, "compile_s": fastest.compile_s}
    return fastest, facts | fastest.implementations.line()


def plot(lines: list[Line], path: pathlib.Path) -> None:
    """Plots ms per step of both sides against the sequence length, a panel per peer."""
    panels = []
    for name in dict.fromkeys(line["peer"] for line in lines):
        peer_lines = [line for line in lines if line["peer"] == name]
        sides = [{"code": name, "ms": line["peer_ms"]} | line for line in peer_lines]
        sides += [{"code": f"flash_lm, {line['family']}", "ms": line["ours_ms"]} | line for line in peer_lines]
        panels.append(Panel(sides, "length", "tokens per sequence", "ms", "milliseconds per training step", title=name))
    plot_panels([panels], path, curve="code")


def make_configs(
    config: ConfigDict, peers: list[str], lengths: list[int], *, keep_remat: bool = False, **step: Any
) -> dict[tuple[str, int], Config]:
    """Returns our configs by peer and length, without remat, as the peers are, unless it is kept."""
    if unknown := [name for name in peers if name not in PEERS]:
        raise InputError(f"--peers={' '.join(unknown)}: must be among {', '.join(PEERS)}")
    configs = {}
    for name in peers:
        changed: Any = config.copy_and_resolve_references()
        changed.model.update(PEERS[name])
        if not keep_remat:
            changed.model.remat = "none"
        for n in lengths:
            configs[name, n] = step_config(changed, changed.model.family, n, **step)
    return configs


def main(argv: list[str]) -> None:
    """Appends to peers.jsonl in OUT after each cell, and at the end writes table.md and peers.png."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--config", default="configs/small.py")
    parser.add_argument("--peers", default=" ".join(PEERS), help="separated by spaces; default: all")
    parser.add_argument("--lengths", default="512 2048 4096", help="sequence lengths, separated by spaces or commas")
    parser.add_argument("--tokens_per_step", type=positive, default=4096)
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--rounds", type=positive, default=ROUNDS)
    parser.add_argument("--seconds", type=positive, help="after which no form is tried, and no length begun")
    add_python(parser)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments, overrides = parser.parse_known_args(argv)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # hides the keys that a family ignores
    check_python(arguments.python)
    config = load_config(arguments.config, overrides)
    peers, lengths = split_words(arguments.peers), parse_integers(arguments.lengths)
    about: Line = {key: getattr(arguments, key) for key in ("dtype", "tokens_per_step")}
    keep_remat = any(word.startswith("--config.model.remat=") for word in overrides)
    configs = make_configs(config, peers, lengths, keep_remat=keep_remat, **about)
    # Both processes need memory on a GPU, which JAX would take as a whole at its first use.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    about |= {"malloc": chosen_settings(user_environment()), "threads": cpu_threads()} | machine()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, lines, left = arguments.out / "peers.jsonl", [], []
    file.unlink(missing_ok=True)
    end = time.perf_counter() + (arguments.seconds or math.inf)
    for name in peers:
        with start_peer(name, arguments.python) as peer:
            for length in lengths:
                if time.perf_counter() > end:
                    left.append(f"{name} at {length}")
                    continue
                line = compare(name, configs[name, length], peer, arguments.rounds, end) | about
                append_jsonl(file, [line])
                lines.append(line)
                print(f"{name} at {length}: {line.get('speedup', line.get('not_compared'))}", flush=True)
    if left:
        print(f"not measured because of --seconds={arguments.seconds}: {', '.join(left)}")
    text = markdown_table([line | {"machine": machines([line])} for line in lines], COLUMNS)
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if (compared := [line for line in lines if "speedup" in line]) and can_draw():
        plot(compared, arguments.out / "peers.png")


if __name__ == "__main__":
    keep_memory()
    run(main)
