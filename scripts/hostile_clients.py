"""Clients that mean no good, for scripts/benchmark_serve.py --hostile; they go on until they are killed.

    python scripts/hostile_clients.py http://127.0.0.1:8000 /api/generate prompt

Of each kind four at a time: texts that are far too long, bodies beyond all measure, a thousand masks, bodies that come
a byte a second, and streams that nobody reads or that are left half open.
"""

import asyncio
import contextlib
import json
import sys
import urllib.parse

EACH = 4  # of a kind


def request(path: str, body: bytes, length: int | None = None) -> bytes:
    """A whole request, or one that promises more than it has."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
    return head.encode() + f"Content-Length: {length or len(body)}\r\n\r\n".encode() + body


async def send(address: tuple[str, int], content: bytes, seconds: float | None = None) -> None:
    """Sends, and reads to the end of the answer; with `seconds` reads nothing, and stays so long."""
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(content)
        await writer.drain()
        await (asyncio.sleep(seconds) if seconds else reader.read())
    finally:
        writer.close()


async def drip(address: tuple[str, int], content: bytes) -> None:
    """A byte a second, until the service has had enough."""
    reader, writer = await asyncio.open_connection(*address)
    end = asyncio.ensure_future(reader.read())
    try:
        for i in range(len(content)):
            writer.write(content[i : i + 1])
            await writer.drain()
            done, _ = await asyncio.wait([end], timeout=1)
            if done:
                return
    finally:
        end.cancel()
        writer.close()


async def attack(url: str, path: str, field: str) -> None:
    """All kinds at once, without end."""
    parts = urllib.parse.urlsplit(url)
    address = parts.hostname or "", parts.port or 80
    ask = lambda text: request(path, json.dumps({field: text}).encode())
    stream = request("/api/generate/stream", json.dumps({"prompt": "a", "max_tokens": 64}).encode())
    kinds = [
        lambda: send(address, ask("long words " * 8_800)),
        lambda: send(address, request(path, b"x" * 3_000_000)),
        lambda: send(address, ask("[MASK]" * 1000)),
        lambda: drip(address, request(path, b"{", length=1000)),
        lambda: send(address, stream, seconds=2.0),
        lambda: send(address, b"POST /api/generate HTTP/1.1\r\nHost: loc", seconds=30.0),
    ]

    async def without_end(kind) -> None:
        while True:
            with contextlib.suppress(OSError):
                await kind()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(without_end(kind) for kind in kinds for _ in range(EACH)))


if __name__ == "__main__":
    asyncio.run(attack(*sys.argv[1:]))
