"""Hostile clients for `python -m benchmarks.service --hostile`; they run until they are killed.

    python -m benchmarks.service.hostile_clients http://127.0.0.1:8000 /api/generate prompt

Two clients of each kind: texts that are far too long, huge bodies, thousands of masks or of unknown keys, as many masks
and candidates as are allowed, bodies that arrive one byte per second or in endless chunks of one byte, streams that
nobody reads, headers that never end, before the first request and after it, and pages that nobody waits for.
"""

import asyncio
import contextlib
import json
import socket
import sys
import urllib.parse
from collections.abc import Awaitable, Callable

EACH = 2  # clients of each kind
PAGES_A_SECOND = 100  # requests per client whose answers are not awaited

Address = tuple[str, int]


def request(path: str, body: bytes, *fields: str, length: int | None = None) -> bytes:
    """Returns a complete request, or one whose Content-Length is larger than its body."""
    fields = fields or (f"Content-Length: {length or len(body)}",)
    head = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *fields, "", ""]
    return "\r\n".join(head).encode() + body


@contextlib.asynccontextmanager
async def connect(address: Address, **options):
    """Opens a connection, and closes it at the end."""
    reader, writer = await asyncio.open_connection(*address, **options)
    try:
        yield reader, writer
    finally:
        writer.close()


async def send(address: Address, content: bytes) -> None:
    """Sends a request, and reads the headers of the answer."""
    async with connect(address) as (reader, writer):
        writer.write(content)
        await writer.drain()
        await reader.readuntil(b"\r\n\r\n")


async def leave(address: Address, content: bytes) -> None:
    """Sends a request without waiting for an answer."""
    async with connect(address) as (_, writer):
        writer.write(content)
        await writer.drain()
    await asyncio.sleep(1 / PAGES_A_SECOND)


async def hold(address: Address, *contents: bytes, seconds: float = 30.0) -> None:
    """Sends requests one after another, reads little of the answers, and stays until it is disconnected."""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.socket(family) as small:
        small.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        small.setblocking(False)
        await asyncio.get_running_loop().sock_connect(small, address)
        reader, writer = await asyncio.open_connection(sock=small, limit=1024)
        for content in contents:
            writer.write(content)
            await writer.drain()
            await asyncio.sleep(0.2)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(writer.wait_closed(), seconds)
        del reader


async def drip(address: Address, head: bytes, piece: bytes, pause: float) -> None:
    """Sends headers and endless pieces of a body, until the service closes the connection."""
    async with connect(address) as (reader, writer):
        writer.write(head)
        end = asyncio.ensure_future(reader.read())
        try:
            while not end.done():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
        finally:
            end.cancel()


async def attack(url: str, path: str, field: str) -> None:
    """Runs all kinds at once, forever."""
    parts = urllib.parse.urlsplit(url)
    address = parts.hostname or "", parts.port or 80
    ask = lambda text, **more: request(path, json.dumps({field: text, **more}).encode())
    strange = {f"key_{i}": 1 for i in range(3000)}
    stream = request("/api/generate/stream", json.dumps({"prompt": "a", "max_tokens": 512}).encode())
    page = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
    chunked = "Transfer-Encoding: chunked"
    # Each kind of client, see the docstring of this module.
    kinds: list[Callable[[], Awaitable[None]]] = [
        lambda: send(address, ask("long words " * 8_800)),
        lambda: send(address, request(path, b"x" * 3_000_000)),
        lambda: send(address, ask("[MASK]" * 1000)),
        lambda: send(address, ask("[MASK]" * 64, candidates=10)),
        lambda: send(address, ask("a", **strange)),
        lambda: drip(address, request(path, b"{", length=1000), b" ", 1.0),
        lambda: drip(address, request("/nowhere", b"", chunked), b"1\r\nx\r\n" * 1000, 0.0),
        lambda: drip(address, request(path, b"", chunked), b"1\r\nx\r\n" * 1000, 0.0),
        lambda: hold(address, stream),
        lambda: hold(address, page * 400),
        lambda: hold(address, page[:-2]),
        lambda: hold(address, page, page[:5]),
        lambda: leave(address, page.replace(b"/ ", b"/nowhere ")),
    ]

    async def repeat_forever(kind: Callable[[], Awaitable[None]]) -> None:
        while True:
            with contextlib.suppress(OSError, EOFError):
                await kind()
            await asyncio.sleep(0.01)

    await asyncio.gather(*(repeat_forever(kind) for kind in kinds for _ in range(EACH)))


if __name__ == "__main__":
    asyncio.run(attack(*sys.argv[1:]))
