"""Clients that hold connections without a request, or never stop sending; other clients are still answered."""

import socket
import threading
import time

import httpx
import pytest

from flash_lm.inference.service import connections, middleware
from flash_lm.inference.service.app import build_app
from flash_lm.inference.service.services import TextService
from inference.service.serving import LIMITS, random_model, run_server, wait_until

pytestmark = pytest.mark.usefixtures("usual_promotion")
HEAD = b"POST /api/generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PAGE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
def client(text):
    return text


@pytest.fixture
def short_timeouts(monkeypatch):
    for module, name in ((connections, "HEAD_SECONDS"), (connections, "READ_SECONDS"), (middleware, "BODY_SECONDS")):
        monkeypatch.setattr(module, name, 0.3)
    monkeypatch.setattr(connections, "_HELD_SECONDS", 0.1)


def connect(client: httpx.Client) -> socket.socket:
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=10)


def is_answered(client: httpx.Client) -> bool:
    """Uses a new connection: one that is kept alive may be closed at that moment."""
    url = client.base_url.join("/api/generate")
    return httpx.post(url, json={"prompt": "a", "max_tokens": 2}, timeout=60).status_code == 200


def read_until_closed(connection: socket.socket) -> bytes:
    """All bytes until the other side closes the connection."""
    received = b""
    try:
        while some := connection.recv(1 << 16):
            received += some
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize(
    ("sent", "statuses"),
    [
        (b"", []),
        (HEAD, []),
        (HEAD + b"Content-Length: 99\r\n\r\n{", [b"408"]),
        (PAGE + b"\r\nG", [b"200"]),
        (PAGE + b"Content-Length: 10\r\n\r\nx", [b"200"]),
        (HEAD.replace(b"localhost", b"a.example") + b"Content-Length: 9\r\n\r\n{", [b"400"]),
        (PAGE + b"\r\n" + PAGE + b"\r\nG", [b"200", b"200"]),
        (b"no HTTP at all\r\n\r\n", [b"400"]),
        (HEAD + b"Content-Length: 3000000\r\n\r\n", [b"413"]),  # at once, after the head
    ],
)
def test_an_incomplete_request_times_out(client, short_timeouts, sent, statuses):
    with connect(client) as slow:
        slow.sendall(sent)
        assert is_answered(client)
        received = read_until_closed(slow)
    assert [part[:3] for part in received.split(b"HTTP/1.1 ")[1:]] == statuses


@pytest.mark.parametrize("path", [b"/api/generate", b"/nowhere"])
def test_chunks_without_end_are_not_read(client, short_timeouts, path):
    """Chunks of one byte: parsing them would occupy the event loop."""
    head = HEAD.replace(b"/api/generate", path) + b"Transfer-Encoding: chunked\r\n\r\n"
    with connect(client) as endless:
        endless.sendall(head + b"1\r\nx\r\n" * 10_000)
        assert is_answered(client)
        received = read_until_closed(endless)
    assert received.startswith(b"HTTP/1.1 411") and b"send the complete body" in received


def test_a_client_that_does_not_read_is_cut_off(client, short_timeouts):
    connections = client.server.server_state.connections
    wait_until(lambda: not connections)
    with socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2304)
        deaf.settimeout(10)
        deaf.connect((client.base_url.host, client.base_url.port))
        wait_until(lambda: len(connections) == 1)
        deaf.sendall((PAGE.replace(b"/health", b"/") + b"\r\n") * 400)
        wait_until(lambda: not connections, seconds=10)
    assert is_answered(client)


def test_the_connection_that_is_idle_for_longest_is_closed(client, monkeypatch):
    wait_until(lambda: not client.server.server_state.connections)
    monkeypatch.setattr(connections, "CONNECTIONS", 3)
    silent = []
    for count in (1, 2, 3):  # one after another
        silent.append(connect(client))
        wait_until(lambda count=count: len(client.server.server_state.connections) == count)
    silent[0].sendall(PAGE + b"\r\n")  # now it is not the oldest
    assert silent[0].recv(4096).startswith(b"HTTP/1.1 200")
    assert is_answered(client)
    silent[1].settimeout(5)  # before the usual timeout of 10 s
    assert read_until_closed(silent[1]) == b""
    silent[2].settimeout(0.1)
    with pytest.raises(TimeoutError):
        silent[2].recv(1)
    for connection in silent:
        connection.close()


def test_many_unknown_keys_are_reported_in_one_sentence(client):
    answer = client.post("/api/generate", json={"prompt": "a", **{f"key_{i}": 1 for i in range(300)}})
    assert answer.status_code == 422 and "301 keys, but only 8 are known" in answer.json()["error"]


def test_many_refusals_are_delayed(client, monkeypatch):
    monkeypatch.setattr(middleware, "REFUSALS_A_SECOND", 4)
    start = time.perf_counter()
    assert {client.get("/nowhere").status_code for _ in range(8)} == {404}
    assert time.perf_counter() - start > 0.5
    assert is_answered(client)


def test_requests_are_checked_off_the_event_loop(client, monkeypatch):
    threads, check = [], TextService.check

    def record_thread(self, asked):
        threads.append(threading.current_thread())
        return check(self, asked)

    monkeypatch.setattr(TextService, "check", record_thread)
    assert is_answered(client)
    assert threads and not {thread.name for thread in threads} & {client.server.thread.name}


def test_further_host_names():
    with run_server(build_app(random_model("text"), LIMITS, ["Model.Example"])) as server:
        for host, status in (
            ("model.example:80", 200),
            ("model.example.", 200),
            ("192.168.1.7", 200),
            ("b.example", 400),
        ):
            assert httpx.get(f"{server.url}/health", headers={"host": host}).status_code == status, host
