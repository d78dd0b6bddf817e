"""Models with random parameters behind real servers."""

import contextlib
import dataclasses
import pathlib
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import httpx
import jax
import uvicorn
from chats import chat_tokenizer
from small import small_config

from flash_lm.config.experiment import parse
from flash_lm.data.tokenizer import ByteTokenizer, CharacterTokenizer
from flash_lm.families.family import complete_config
from flash_lm.inference.api import LoadedModel
from flash_lm.inference.decode_params import DecodeParams
from flash_lm.inference.service import connections
from flash_lm.inference.service.app import build_app
from flash_lm.inference.service.limits import Limits
from flash_lm.runs.labels import write_labels
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import run_name
from flash_lm.training.sharding import make_mesh
from flash_lm.training.train_state import ModelFunction

LABELS = ("bad", "good", "so so")
CHARACTERS = "春夏秋冬東南西北山水"
LIMITS = Limits(rows=4, waiting=64, prompt_tokens=64, masks=8, new_tokens=64, request_tokens=4000, seconds=60)


def random_model(kind: str, family: str = "flash", keys: Mapping[str, Any] | None = None) -> LoadedModel:
    """A model of kind text, chat, couplets, fill_in, labels or label_pairs; `keys`: config keys by full name."""
    raw = small_config("corpus", pathlib.Path("cache"))
    raw.model.family = family
    raw.mesh.shape = (1, 1, 1)
    tokenizers = {"couplets": lambda: CharacterTokenizer(CHARACTERS), "chat": chat_tokenizer}
    tokenizer = tokenizers.get(kind, ByteTokenizer)()
    if kind == "couplets":
        raw.data.update(corpus="couplets", pack="examples", path="couplets")
    if kind == "fill_in":
        raw.task = "masked_lm"
    folder = pathlib.Path(f"a_{kind}_run")
    if kind.startswith("label"):
        raw.task, raw.model.classes.count = "classify", len(LABELS)
        raw.data.update(corpus="hf", path="reviews", label_column="label")
        raw.data.pair_column = "other" if kind == "label_pairs" else None
        folder = pathlib.Path(tempfile.mkdtemp()) / folder.name
        folder.mkdir()
        write_labels(folder, LABELS)
    raw.update_from_flattened_dict(keys or {})
    raw.model.vocab_size = tokenizer.vocab_size
    config = complete_config(parse(raw))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, dropout=0.0))
    model, mesh = ModelFunction(config.model, seed=1), make_mesh(config.mesh, jax.devices()[:1])
    params = DecodeParams(model, jax.jit(model.init)())
    return LoadedModel(7, config, tokenizer, params, mesh, {}, run_name(folder), RunFolder(folder))


@contextlib.contextmanager
def run_server(app) -> Iterator[uvicorn.Server]:
    """Runs a server of an app in a thread, at `server.url`; it ends like a command that receives a signal."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    server = connections.server(app, 30, port)
    server.url = f"http://127.0.0.1:{port}"
    server.thread = thread = threading.Thread(target=server.run, name="event loop", daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(timeout=60)
    assert not thread.is_alive()


@contextlib.contextmanager
def service(
    kind: str, family: str = "flash", keys: Mapping[str, Any] | None = None, key: str | None = None, **changes
) -> Iterator[httpx.Client]:
    """A client of a service of a random model, without its API key; `changes`: changed limits."""
    app = build_app(random_model(kind, family, keys), dataclasses.replace(LIMITS, **changes), key=key)
    with run_server(app) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        client.app, client.server = app, server
        yield client


def wait_until(condition, seconds: float = 60) -> None:
    """Waits until a condition is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never was"
        time.sleep(0.01)


def gauge(client: httpx.Client, name: str) -> float:
    """A value of /metrics."""
    lines = client.get("/metrics").text.splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"flash_lm_{name}"))


def raise_error(*_):
    raise RuntimeError("out of memory")
