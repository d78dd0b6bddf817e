"""Measures a service under load: requests and tokens per second, latencies, and memory.

    python -m benchmarks.service --workdir=runs/x --out=benchmarks/service/results [--clients="1 4 16"]
    python -m benchmarks.service --workdir=runs/x --out=benchmarks/service/results --hostile

Clients stream greedy continuations of random prompts, one request after another, or ask a masked model to fill in a
mask. The service is a separate process on the same machine. Memory is its resident set after the first hundred requests
and after all. With --hostile, four normal clients are measured alone and with those of hostile_clients.py, in turns.
"""

import argparse
import asyncio
import contextlib
import json
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import jax

from flash_lm.cli.run import run
from flash_lm.cli.types import parse_integers, positive
from flash_lm.errors import RunError
from flash_lm.report.markdown import Columns, markdown_table
from flash_lm.runs.jsonl import Line, append_jsonl, write_jsonl
from flash_lm.runs.provenance import provenance

NORMAL_CLIENTS = 4  # normal clients next to hostile ones
_SHOWN = ("p50_ms", "p99_ms", "requests_per_s", "resident_mb")
EARLY = 100  # requests until memory is measured for the first time
COLUMNS: Columns = {
    "clients": ("clients", "{}"),
    "requests": ("requests", "{:,}"),
    "requests/s": ("requests_per_s", "{:.1f}"),
    "tokens/s": ("tokens_per_s", "{:,.0f}"),
    "p50 ms": ("p50_ms", "{:.0f}"),
    "p99 ms": ("p99_ms", "{:.0f}"),
    "first token, p50 ms": ("first_p50_ms", "{:.1f}"),
    "p99 ms of it": ("first_p99_ms", "{:.1f}"),
    "MB": ("resident_mb", "{:,.0f}"),
}


async def ask(client: httpx.AsyncClient, prompt: str, tokens: int) -> tuple[float, float, int]:
    """Sends a request; returns ms to the first token, ms to the end, and the number of tokens; 0 fills in a mask."""
    start, first, name = time.perf_counter(), 0.0, ""
    if not tokens:
        answer = await client.post("/api/fill_in", json={"prompt": f"{prompt} [MASK]"})
        if answer.status_code != 200:
            raise RunError(f"the service returned {answer.status_code}: {answer.text}")
        took = 1000 * (time.perf_counter() - start)
        return took, took, 1
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    async with client.stream("POST", "/api/generate/stream", json=body) as response:
        if response.status_code != 200:
            raise RunError(f"the service returned {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
                first = first or time.perf_counter() - start
            elif line.startswith("data: ") and name == "done":
                return 1000 * first, 1000 * (time.perf_counter() - start), json.loads(line[6:])["tokens"]
    raise RunError("a stream ended without an answer")


async def load(url: str, clients: int, requests: int, tokens: int) -> list[tuple[float, float, int]]:
    """Sends `requests` requests from `clients` clients; returns their timings, see `ask`."""
    draw = random.Random(clients)
    prompts = [
        " ".join(draw.choices(["the", "of", "and", "a", "light", "river", "old", "stone"], k=8))
        for _ in range(requests)
    ]
    limits = httpx.Limits(max_connections=clients)

    async def one(client: httpx.AsyncClient) -> list[tuple[float, float, int]]:
        timings = []
        while prompts:
            timings.append(await ask(client, prompts.pop(), tokens))
        return timings

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        return [x for each in await asyncio.gather(*(one(client) for _ in range(clients))) for x in each]


def resident_mb(process: int) -> float:
    """Returns the resident memory of a process in MB, on Linux."""
    match = re.search(r"VmRSS:\s+(\d+) kB", pathlib.Path(f"/proc/{process}/status").read_text())
    assert match
    return int(match[1]) / 1e3


def measure(url: str, process: int, clients: int, requests: int, tokens: int) -> Line:
    """Measures a load; returns a flat line."""
    start = time.perf_counter()
    timings = asyncio.run(load(url, clients, requests, tokens))
    seconds = time.perf_counter() - start
    first_ms, total_ms, counts = (list(x) for x in zip(*timings, strict=True))
    hundredth = lambda values, n: statistics.quantiles(values, n=100, method="inclusive")[n - 1]
    return {
        "clients": clients,
        "requests": len(timings),
        "tokens_a_request": tokens,
        "requests_per_s": len(timings) / seconds,
        "tokens_per_s": sum(counts) / seconds,
        "p50_ms": statistics.median(total_ms),
        "p99_ms": hundredth(total_ms, 99),
        "first_p50_ms": statistics.median(first_ms),
        "first_p99_ms": hundredth(first_ms, 99),
        "resident_mb": resident_mb(process),
    }


@contextlib.contextmanager
def hostile_clients(url: str, tokens: int) -> Iterator[None]:
    """Runs hostile clients in a separate process until the block ends."""
    path = "/api/generate" if tokens else "/api/fill_in"
    program = pathlib.Path(__file__).with_name("hostile_clients.py")
    others = subprocess.Popen([sys.executable, str(program), url, path, "prompt"])
    time.sleep(2)  # until all are connected
    try:
        yield
    finally:
        others.kill()
        others.wait()


def measure_hostile(url: str, process: int, requests: int, tokens: int, turns: int) -> list[Line]:
    """Measures normal clients alone and with hostile ones, in turns; the ratios compare the two within a turn."""
    lines = []
    for turn in range(1, turns + 1):
        alone = measure(url, process, NORMAL_CLIENTS, requests, tokens)
        with hostile_clients(url, tokens):
            with_hostile = measure(url, process, NORMAL_CLIENTS, requests, tokens)
        ratios = {f"{key}_ratio": with_hostile[f"{key}_ms"] / alone[f"{key}_ms"] for key in ("p50", "p99")}
        shown = {
            f"{key}_{who}": line[key] for who, line in (("alone", alone), ("beside", with_hostile)) for key in _SHOWN
        }
        lines.append({"turn": turn, "clients": NORMAL_CLIENTS, "requests": requests, **shown, **ratios})
        print(f"turn {turn}: p50 {ratios['p50_ratio']:.2f}, p99 {ratios['p99_ratio']:.2f} times as long", flush=True)
    return lines


def main(argv: list[str]) -> None:
    """Writes serve.jsonl and table.md, or with --hostile hostile_KIND.jsonl, to OUT."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service", description=main.__doc__)
    parser.add_argument("--workdir", required=True, help="the folder of a run trained on text")
    parser.add_argument("--clients", default="1 4 16", help="separated by spaces or commas")
    parser.add_argument(
        "--hostile", action="store_true", help="measure how long normal clients wait when hostile clients run, too"
    )
    parser.add_argument("--turns", type=positive, default=5, help="number of turns with --hostile")
    parser.add_argument("--requests", type=positive, default=400, help="for each number of clients")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens per answer")
    parser.add_argument("--more", type=positive, default=10_000, help="requests until memory is measured again")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments = parser.parse_args(argv)
    clients, file = parse_integers(arguments.clients), arguments.out / "serve.jsonl"
    # Start the service, and wait for its address.
    words = [sys.executable, "-m", "flash_lm.serve", f"--workdir={arguments.workdir}", "--port=0"]
    service = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert service.stdout
    try:
        if not (first := service.stdout.readline()):
            raise RunError("the service did not start: see its output above")
        url, lines = first.split()[0], []
        kind = httpx.get(f"{url}/api/model").json()["kind"]
        tokens = 0 if kind == "fill_in" else arguments.tokens
        if arguments.hostile:
            measure(url, service.pid, NORMAL_CLIENTS, EARLY, tokens)  # warm
            lines = measure_hostile(url, service.pid, arguments.requests, tokens, arguments.turns)
            return write_hostile(lines, arguments.out / f"hostile_{kind}.jsonl", pathlib.Path(arguments.workdir).name)
        # Memory early and late, and the load in between.
        measure(url, service.pid, max(clients), EARLY, arguments.tokens)  # warm-up; first look at its memory
        early_mb = resident_mb(service.pid)
        for number in clients:
            lines.append(measure(url, service.pid, number, arguments.requests, arguments.tokens))
            print(f"{number} clients: {lines[-1]['requests_per_s']:.1f} requests/s", flush=True)
        more = measure(url, service.pid, max(clients), arguments.more, arguments.tokens)
    finally:
        service.terminate()
        service.wait(60)
    # Write lines and table.
    memory = {"early_resident_mb": early_mb, "late_resident_mb": more["resident_mb"], "late_requests": arguments.more}
    about = provenance(jax.devices()[0].device_kind) | {"run": pathlib.Path(arguments.workdir).name} | memory
    arguments.out.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    append_jsonl(file, [line | about for line in lines])
    text = markdown_table(lines, COLUMNS) + (
        f"\n\nResident memory after {EARLY} requests {early_mb:,.0f} MB, after {arguments.more:,} more "
        f"{more['resident_mb']:,.0f} MB"
    )
    (arguments.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print(text)


def write_hostile(lines: list[Line], file: pathlib.Path, name: str) -> None:
    """Writes one line per turn, and the medians of the ratios."""
    about = provenance(jax.devices()[0].device_kind) | {"run": name}
    medians = {key: statistics.median(line[key] for line in lines) for key in ("p50_ratio", "p99_ratio")}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_jsonl(file, [line | about for line in [*lines, {"turn": "median", **medians}]])
    print(f"medians of {len(lines)} turns: p50 {medians['p50_ratio']:.2f}, p99 {medians['p99_ratio']:.2f}")


if __name__ == "__main__":
    run(main)
