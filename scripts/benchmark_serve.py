"""What a service of a run answers under load: requests and tokens a second, latencies, and its memory.

    python scripts/benchmark_serve.py --workdir=runs/x --out=results/serve [--clients="1 4 16"]

Clients ask one after the other for greedy continuations of random prompts, by streams; the service is a process of its
own on the same machine. Memory is its resident set after the first hundred requests and after all.
"""

import argparse
import asyncio
import json
import pathlib
import random
import re
import statistics
import subprocess
import sys
import time

import httpx
import jax

from flash_lm.analysis.table import Columns, markdown_table
from flash_lm.command import positive, run, whole_numbers
from flash_lm.errors import RunError
from flash_lm.jsonl import Line, append_jsonl
from flash_lm.provenance import provenance

EARLY = 100  # requests, after which memory is looked at for the first time
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
    """Milliseconds to the first token and to the end, and the number of tokens."""
    start, first, name = time.perf_counter(), 0.0, ""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
    async with client.stream("POST", "/api/generate/stream", json=body) as response:
        if response.status_code != 200:
            raise RunError(f"the service answers {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
                first = first or time.perf_counter() - start
            elif line.startswith("data: ") and name == "done":
                return 1000 * first, 1000 * (time.perf_counter() - start), json.loads(line[6:])["tokens"]
    raise RunError("a stream ended without an answer")


async def load(url: str, clients: int, requests: int, tokens: int) -> list[tuple[float, float, int]]:
    """So many requests by so many clients."""
    draw = random.Random(clients)
    prompts = [
        " ".join(draw.choices(["the", "of", "and", "a", "light", "river", "old", "stone"], k=8))
        for _ in range(requests)
    ]
    limits = httpx.Limits(max_connections=clients)

    async def one(client: httpx.AsyncClient) -> list[tuple[float, float, int]]:
        found = []
        while prompts:
            found.append(await ask(client, prompts.pop(), tokens))
        return found

    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        return [x for each in await asyncio.gather(*(one(client) for _ in range(clients))) for x in each]


def resident_mb(process: int) -> float:
    """Of a process, Linux."""
    found = re.search(r"VmRSS:\s+(\d+) kB", pathlib.Path(f"/proc/{process}/status").read_text())
    assert found
    return int(found[1]) / 1e3


def measure(url: str, process: int, clients: int, requests: int, tokens: int) -> Line:
    """A flat line."""
    start = time.perf_counter()
    found = asyncio.run(load(url, clients, requests, tokens))
    seconds = time.perf_counter() - start
    first, whole, counts = (list(x) for x in zip(*found, strict=True))
    hundredth = lambda values, n: statistics.quantiles(values, n=100, method="inclusive")[n - 1]
    return {
        "clients": clients,
        "requests": len(found),
        "tokens_a_request": tokens,
        "requests_per_s": len(found) / seconds,
        "tokens_per_s": sum(counts) / seconds,
        "p50_ms": statistics.median(whole),
        "p99_ms": hundredth(whole, 99),
        "first_p50_ms": statistics.median(first),
        "first_p99_ms": hundredth(first, 99),
        "resident_mb": resident_mb(process),
    }


def main(argv: list[str]) -> None:
    """Writes serve.jsonl and table.md to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--workdir", required=True, help="folder of a run that was trained on text")
    parser.add_argument("--clients", default="1 4 16", help="between blanks")
    parser.add_argument("--requests", type=positive, default=400, help="for each number of clients")
    parser.add_argument("--tokens", type=positive, default=32, help="of an answer")
    parser.add_argument("--more", type=positive, default=10_000, help="requests after which memory is looked at again")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder")
    arguments = parser.parse_args(argv)
    clients, file = whole_numbers(arguments.clients), arguments.out / "serve.jsonl"
    words = [sys.executable, "-m", "flash_lm.serve", f"--workdir={arguments.workdir}", "--port=0"]
    service = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert service.stdout
    try:
        if not (told := service.stdout.readline()):
            raise RunError("the service did not start; what it says is above")
        url, lines = told.split()[0], []
        measure(url, service.pid, max(clients), EARLY, arguments.tokens)  # warm, and the first look at its memory
        early_mb = resident_mb(service.pid)
        for number in clients:
            lines.append(measure(url, service.pid, number, arguments.requests, arguments.tokens))
            print(f"{number} clients: {lines[-1]['requests_per_s']:.1f} requests/s", flush=True)
        more = measure(url, service.pid, max(clients), arguments.more, arguments.tokens)
    finally:
        service.terminate()
        service.wait(60)
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


if __name__ == "__main__":
    run(main)
