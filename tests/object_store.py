"""A server of Google Cloud Storage in this process, for tests: an emulator, with what it lacks.

The emulator ignores preconditions (https://cloud.google.com/storage/docs/request-preconditions), does not move objects
(https://cloud.google.com/storage/docs/json_api/v1/objects/move), and does not send the generation of an object with its
content (https://cloud.google.com/storage/docs/xml-api/reference-headers).
"""

import contextlib
import logging
import re
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus, server
from urllib.parse import unquote

import pytest
from gcp_storage_emulator.exceptions import NotFound
from gcp_storage_emulator.handlers import buckets
from gcp_storage_emulator.server import RequestHandler, Response, Router
from gcp_storage_emulator.storage import Storage

from flash_lm.runs import local_copy, storage

BUCKET = "bucket"
logging.getLogger("gcp_storage_emulator").setLevel(logging.CRITICAL + 1)  # an object that is missing is no error
_OBJECT = re.compile(r"(?:/download|/upload)?/storage/v1/b/(?P<bucket>[^/]+)/o(?:/(?P<name>[^/]+))?")

_MOVE = re.compile(r"/storage/v1/b/(?P<bucket>[^/]+)/o/(?P<source>[^/]+)/moveTo/o/(?P<target>[^/]+)")


class Store:
    """The objects of the server, and what the test wants to know or change.

    Attributes:
        storage: the emulator's objects.
        requests: number of requests by method and kind, such as POST upload.
        forbidden: a regex of requests, such as POST /upload/…, that are refused for want of rights; None: none.
    """

    def __init__(self):
        self.storage, self.lock = Storage(use_memory_fs=True), threading.Lock()
        self.requests, self.forbidden = Counter(), None
        buckets.create_bucket(BUCKET, self.storage)

    def clear(self) -> None:
        """Removes all objects, and gives all rights."""
        self.forbidden = None
        self.storage.wipe(keep_buckets=True)
        self.requests.clear()

    def generation(self, bucket: str, name: str) -> str:
        """The number of an object's version; 0: no such object."""
        try:
            return self.storage.get_file_obj(bucket, name)["generation"]
        except NotFound:
            return "0"

    def names(self, prefix: str = "") -> list[str]:
        """The names of all objects that begin with a prefix."""
        return sorted(name for name in self.storage.objects.get(BUCKET, {}) if name.startswith(prefix))


class _Handler(RequestHandler):
    store: Store

    def __init__(self, store: Store, *args):
        self.store = store
        super().__init__(store.storage, *args)

    def send_response(self, code, message=None):
        super().send_response(code, message)
        match = _OBJECT.fullmatch(self.path.partition("?")[0])
        if match and match["name"] and self.command == "GET" and code < 300:
            generation = self.store.generation(match["bucket"], unquote(match["name"]))
            self.send_header("x-goog-generation", generation)
            self.send_header("x-goog-metageneration", "1")

    def do_GET(self):  # noqa: N802
        self._answer("GET")

    do_POST = lambda self: self._answer("POST")
    do_PUT = lambda self: self._answer("PUT")
    do_DELETE = lambda self: self._answer("DELETE")
    do_PATCH = lambda self: self._answer("PATCH")

    def _answer(self, method: str) -> None:
        with self.store.lock:
            path = self.path.partition("?")[0]
            kind = "upload" if path.startswith("/upload") else "read" if "/o/" in path else "list"
            self.store.requests[f"{method} {kind}"] += 1
            is_forbidden = self.store.forbidden and re.match(self.store.forbidden, f"{method} {path}")
            if is_forbidden or self._precondition_fails():
                self.rfile.read(int(self.headers.get("Content-Length") or 0))
                response = Response(self)
                response.status = HTTPStatus.FORBIDDEN if is_forbidden else HTTPStatus.PRECONDITION_FAILED
                response.json({"error": {"code": response.status.value, "message": response.status.phrase}})
                response.close()
                return
            if match := _MOVE.fullmatch(path):
                self._move(match["bucket"], unquote(match["source"]), unquote(match["target"]))
            else:
                Router(self).handle(method)

    def _move(self, bucket: str, source: str, target: str) -> None:
        storage, response = self.store.storage, Response(self)
        try:
            about = storage.get_file_obj(bucket, source) | {"name": target}
            storage.create_file(bucket, target, storage.get_file(bucket, source), about)
            storage.delete_file(bucket, source)
            response.json(about)
        except NotFound:
            response.status = HTTPStatus.NOT_FOUND
        response.close()

    def _precondition_fails(self) -> bool:
        query = dict(re.findall(r"[?&]([^=&]+)=([^&]*)", self.path))
        match = _OBJECT.fullmatch(self.path.partition("?")[0])
        if "ifGenerationMatch" not in query or not match:
            return False
        name = match["name"] or query.get("name")
        if name is None:  # in the body of a multipart upload, which can be read once
            length = int(self.headers["Content-Length"])
            body = self.rfile.read(length)
            self.rfile = _Again(body)
            name = re.search(rb'"name": "([^"]+)"', body)[1].decode()
        return query["ifGenerationMatch"] != self.store.generation(match["bucket"], unquote(name))


class _Again:
    """A body that has been read."""

    def __init__(self, body: bytes):
        self.body = body

    def read(self, length: int) -> bytes:
        return self.body[:length]

    def close(self) -> None:
        pass


@contextlib.contextmanager
def serve() -> Iterator[tuple[Store, str]]:
    """Starts a server with an empty bucket; yields its objects and its address."""
    store = Store()
    http = _Server(("127.0.0.1", 0), partial(_Handler, store))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield store, f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def environment(address: str) -> dict[str, str]:
    """The variables that point gcsfs, Google's client and TensorStore to a server."""
    return {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
        "GOOGLE_CLOUD_PROJECT": "test",
        "NO_GCE_CHECK": "true",
    }


class _Server(server.ThreadingHTTPServer):
    daemon_threads, request_queue_size = True, 128

    def handle_error(self, request, client_address):
        """Says nothing: TensorStore closes a connection when it knows enough."""


@pytest.fixture(scope="session")
def _server() -> Iterator[Store]:
    with serve() as (store, address), pytest.MonkeyPatch.context() as patch:
        for name, value in environment(address).items():
            patch.setenv(name, value)
        yield store


@pytest.fixture
def bucket(_server, tmp_path, monkeypatch) -> Store:
    """An empty bucket, gs://bucket, and no copies of its objects on this machine."""
    monkeypatch.setattr(local_copy, "_COPIES", str(tmp_path / "copies"))
    storage._check_access.cache_clear()
    _server.clear()
    return _server
