"""Times our training step and those of other libraries, in turns: same shape, precision and number of parameters.

    make peers
    python -m benchmarks.peers.speed --out=benchmarks/peers/results/sdpa [--peers=sdpa --lengths="512 2048" …]

A peer runs in a separate environment (requirements-peers.txt), in a process that waits during our turn. A step is
forward, backward, clipping and AdamW of the same number of tokens, which are on the device. Both sides run in their
fastest form: the peer's step by torch.compile with the attention that PyTorch chooses, ours with its defaults. On a CPU
both have the same number of threads, and an allocator that keeps memory, unless the environment has other settings, as
in GLIBC_TUNABLES=glibc.malloc.hugetlb=0. Compilation is not timed.
"""

import argparse
import json
import logging
import os
import pathlib
import subprocess
from typing import Any

import jax
from ml_collections import ConfigDict

from benchmarks.lib.allocator import chosen_settings, keep_memory
from benchmarks.lib.bare_step import BareStep, step_config
from benchmarks.lib.machine import machine, machines
from benchmarks.lib.peaks import peak_flops
from benchmarks.lib.peers import MOST_UNEQUAL, add_python, check_python, peer_shape
from benchmarks.lib.timing import ROUNDS, Cell, make_turn, take_turns
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
from flash_lm.training.train_state import ModelFunction

# peer -> our config keys of the same model
PEERS: dict[str, dict[str, Any]] = {
    "sdpa": {"family": "transformer"},
    "flash_pytorch": {"family": "flash", "tie_embeddings": False},
    "fast_transformers": {"family": "linear_transformer"},
    "flash_linear_attention": {"family": "linear_transformer", "absolute_positions": "none"},
}
WORKER = pathlib.Path(__file__).with_name("speed_worker.py")
COLUMNS = {
    "peer": ("peer", "{}"),
    "compiled": ("peer_compiled", "{}"),
    "ours": ("family", "{}"),
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


def compare(name: str, config: Config, peer: subprocess.Popen, rounds: int) -> Line:
    """Returns a line with the step times of both sides and their forms, or why they are not compared."""
    line: Line = {"peer": name, "family": config.model.family, "length": config.data.length}
    line |= {"params": ModelFunction(config.model, config.seed).parameter_count(), "remat": config.model.remat}
    try:
        about = ask(peer, {"build": peer_shape(config)})
        line |= {f"peer_{key}": value for key, value in about.items()}
        if "why_eager" in about:
            print(f"{line['peer']} runs eagerly: {about['why_eager']}", flush=True)
        unequal = abs(about["params"] / line["params"] - 1)
        if unequal > MOST_UNEQUAL:
            return line | {"not_compared": f"the numbers of parameters differ by {unequal:.1%}"}
        theirs = Cell.warm_up("peer", lambda: ask(peer, {"turn": 1})["ms"])
        step = BareStep(config)
        line |= {"kernels": step.kernels, "compile_s": step.compile_s, **step.implementations.line()}
        step.start()
        ours = Cell.warm_up("ours", make_turn(step.step))
        take_turns([ours, theirs], rounds)
    except PeerError as error:
        return line | {"not_compared": str(error)}
    peak = peak_flops(jax.devices()[0].device_kind, config.model.dtype)
    for side, cell in (("ours", ours), ("peer", theirs)):
        line |= {f"{side}_ms": cell.median_ms, f"{side}_iqr_ms": cell.iqr_ms, f"{side}_turns": len(cell.times_ms)}
        if peak:
            line[f"{side}_peak_fraction"] = step.model_flops / (cell.median_ms / 1000) / peak
    return line | {"speedup": theirs.median_ms / ours.median_ms}


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
    config: ConfigDict, peers: list[str], lengths: list[int], **step: Any
) -> dict[tuple[str, int], Config]:
    """Returns our configs by peer and length."""
    if unknown := [name for name in peers if name not in PEERS]:
        raise InputError(f"--peers={' '.join(unknown)}: must be among {', '.join(PEERS)}")
    configs = {}
    for name in peers:
        changed: Any = config.copy_and_resolve_references()
        changed.model.update(PEERS[name])
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
    add_python(parser)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments, overrides = parser.parse_known_args(argv)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # hides the keys that a family ignores
    check_python(arguments.python)
    config = load_config(arguments.config, overrides)
    peers, lengths = split_words(arguments.peers), parse_integers(arguments.lengths)
    about: Line = {key: getattr(arguments, key) for key in ("dtype", "tokens_per_step")}
    configs = make_configs(config, peers, lengths, **about)
    # Both processes need memory on a GPU, which JAX would take as a whole at its first use.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    about |= {"malloc": chosen_settings(user_environment()), "threads": cpu_threads()} | machine()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file, lines = arguments.out / "peers.jsonl", []
    file.unlink(missing_ok=True)
    for name in peers:
        with start_peer(name, arguments.python) as peer:
            for length in lengths:
                line = compare(name, configs[name, length], peer, arguments.rounds) | about
                append_jsonl(file, [line])
                lines.append(line)
                print(f"{name} at {length}: {line.get('speedup', line.get('not_compared'))}", flush=True)
    text = markdown_table([line | {"machine": machines([line])} for line in lines], COLUMNS)
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)
    if (compared := [line for line in lines if "speedup" in line]) and can_draw():
        plot(compared, arguments.out / "peers.png")


if __name__ == "__main__":
    keep_memory()
    run(main)
