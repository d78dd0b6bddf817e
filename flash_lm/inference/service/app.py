"""The web service of one model: a page, a JSON API with its OpenAPI description, health, and metrics."""

import asyncio
import contextlib
import json
import pathlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from fastapi.sse import format_sse_event

from flash_lm.inference.model import TrainedModel
from flash_lm.inference.service.chat_completions import ChatCompletions
from flash_lm.inference.service.completion_routes import add_chat, add_completions, add_models
from flash_lm.inference.service.completions import Completions
from flash_lm.inference.service.limits import Limits
from flash_lm.inference.service.metrics import Metrics
from flash_lm.inference.service.middleware import AllowedHosts, BodyLimit, RefusalDelay, RequestMetrics
from flash_lm.inference.service.problems import PROBLEMS, STATUS, add_errors, problem, run_while_connected
from flash_lm.inference.service.requests import (
    FillInAnswer,
    FillInAsked,
    LabelAnswer,
    LabelAsked,
    ModelAnswer,
    SecondLinesAnswer,
    SecondLinesAsked,
    TextAnswer,
    TextAsked,
)
from flash_lm.inference.service.scheduler import FailedError
from flash_lm.inference.service.security import ApiKeyCheck, SecurityHeaders, page_headers
from flash_lm.inference.service.services import CoupletService, FillInService, LabelService, TextService

Answer = TypeVar("Answer")
Service = TextService | CoupletService | FillInService | LabelService
_SERVICES: dict[str | None, type[Service]] = {
    "couplets": CoupletService,
    "fill_in": FillInService,
    "label": LabelService,
}

_PAGE, _DOCS = (pathlib.Path(__file__).parent / name for name in ("page.html", "docs.html"))
_EVENTS = {
    "type": "object",
    "properties": {"event": {"enum": ["text", "done", "error"]}, "data": {"type": "string"}},
    "required": ["event", "data"],
}
_LONGEST_ESCAPE, _OTHER_FIELDS = 6, 4096  # bytes: of a character escaped in JSON; of all fields except the text
LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


def follow(trained: TrainedModel, limits: Limits) -> None:
    """Runs the other hosts of a distributed model until the service ends; raises as `build_app` does."""
    calls = _service(trained, limits, Metrics()).calls_on_all_hosts
    assert calls
    calls.follow()


def _service(trained: TrainedModel, limits: Limits, metrics: Metrics) -> Service:
    return _SERVICES.get(trained.writes, TextService)(trained, limits, metrics)


def build_app(trained: TrainedModel, limits: Limits, names: Sequence[str] = (), key: str | None = None) -> FastAPI:
    """Builds the web service of a trained model.

    Args:
        trained: a model trained on text or couplets, a masked model, or a model of labels.
        limits: limits of requests.
        names: host names that clients may use, besides localhost.
        key: API key that clients must send; None: they need none.

    Raises:
        InputError: the model was trained on something else.
    """
    # The service, which compiles; with several hosts they follow its calls from now on.
    metrics, config = Metrics(), trained.config
    service = _service(trained, limits, metrics)
    if calls := service.calls_on_all_hosts:
        calls.lead()

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(service.close)

    # Middleware, the last one added is the outermost: headers, delays, host names, key, metrics, size of the body.
    app = FastAPI(title=f"flash_lm: {trained.name}", version="1", lifespan=lifespan, docs_url=None, redoc_url=None)
    add_errors(app, limits)
    texts = 2 if config.data.pair_column else 1
    app.add_middleware(BodyLimit, most_bytes=texts * _LONGEST_ESCAPE * limits.characters(trained) + _OTHER_FIELDS)
    app.add_middleware(RequestMetrics, metrics=metrics)
    if key is not None:
        app.add_middleware(ApiKeyCheck, key=key)
    app.add_middleware(AllowedHosts, names=LOCAL | {name.lower() for name in names})
    app.add_middleware(RefusalDelay)
    app.add_middleware(SecurityHeaders)

    # The description of the model, for the page and for clients.
    longest = trained.model.abstract.longest
    about = ModelAnswer(
        name=trained.name,
        kind=service.kind,
        family=config.model.label,
        corpus=config.data.corpus,
        step=trained.step,
        parameters=trained.model.parameter_count(),
        most_prompt_tokens=limits.max_prompt_tokens(trained),
        most_new_tokens=limits.new_tokens if longest is None else min(limits.new_tokens, longest - 1),
        of_pairs=config.data.pairs,
        chat=trained.can_chat,
        state_bytes=service.state_bytes,
    )

    # Pages, health and metrics, for every kind of model.
    page, docs = (path.read_text(encoding="utf-8") for path in (_PAGE, _DOCS))

    @app.get("/", include_in_schema=False)
    async def index() -> HTMLResponse:
        return HTMLResponse(page, headers=page_headers(page))

    @app.get("/docs", include_in_schema=False)
    async def api() -> HTMLResponse:
        return HTMLResponse(docs, headers=page_headers(docs))  # FastAPI's page would load files from the network

    @app.get("/api/model")
    async def model() -> ModelAnswer:
        """The checkpoint that is served."""
        return about

    @app.get("/health", responses={500: PROBLEMS[500]})
    async def health() -> dict[str, str]:
        """Whether requests are answered."""
        if isinstance(service, TextService | CoupletService) and service.rows.scheduler.failed:
            raise FailedError
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    async def prometheus() -> Response:
        """Metrics for Prometheus."""
        return PlainTextResponse(metrics.text())

    # The routes of this kind of model.
    routes = {
        TextService: _add_text,
        CoupletService: _add_couplets,
        FillInService: _add_fill_in,
        LabelService: _add_labels,
    }
    routes[type(service)](app, service, limits)
    add_models(app, trained)
    if isinstance(service, TextService):
        add_completions(app, Completions(trained, service, limits), trained, limits)
        add_chat(app, ChatCompletions(trained, service, limits), trained, limits)
    return app


def _add_text(app: FastAPI, service: TextService, limits: Limits) -> None:
    @app.post("/api/generate", responses=PROBLEMS)
    async def generate(asked: TextAsked, request: Request) -> TextAnswer:
        """Continues a prompt."""
        # The answer is the last event of the stream.
        row = await asyncio.to_thread(service.check, asked)

        async def last() -> TextAnswer:
            async for event in service.stream(row):
                if isinstance(event, TextAnswer):
                    return event
            raise AssertionError("a stream ends with the complete answer")

        return await run_while_connected(request, last(), limits)

    @app.post(
        "/api/generate/stream",
        response_class=StreamingResponse,
        responses=PROBLEMS | {200: {"content": {"text/event-stream": {"schema": _EVENTS}}}},
    )
    async def stream(asked: TextAsked) -> StreamingResponse:
        """Continues a prompt; streams the answer as server-sent events.

        A `text` event has the next piece of text, with tokens, tokens_per_second and state_bytes; `done` has the
        complete answer; `error` says why it failed.
        """
        row = await asyncio.to_thread(service.check, asked)

        # Once the stream has begun, its status is 200: errors become events.
        async def events() -> AsyncIterator[bytes]:
            try:
                async with asyncio.timeout(limits.seconds):
                    async for event in service.stream(row):
                        yield _event("done" if isinstance(event, TextAnswer) else "text", event.model_dump())
            except tuple(STATUS) as error:
                yield _event("error", {"error": problem(error, limits)[1]})

        return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-store"})


def _add_couplets(app: FastAPI, service: CoupletService, limits: Limits) -> None:
    @app.post("/api/second_lines", responses=PROBLEMS)
    async def second_lines(asked: SecondLinesAsked, request: Request) -> SecondLinesAnswer:
        """Second lines for a first line, of the same length, most likely first."""
        rows = await asyncio.to_thread(service.check, asked)
        return await run_while_connected(request, service.answer(asked.first, rows), limits)


def _add_fill_in(app: FastAPI, service: FillInService, limits: Limits) -> None:
    @app.post("/api/fill_in", responses=PROBLEMS)
    async def fill_in(asked: FillInAsked, request: Request) -> FillInAnswer:
        """The most likely tokens for each [MASK]."""
        await asyncio.to_thread(service.check, asked)
        return await run_while_connected(request, service.answer(asked), limits)


def _add_labels(app: FastAPI, service: LabelService, limits: Limits) -> None:
    @app.post("/api/classify", responses=PROBLEMS)
    async def classify(asked: LabelAsked, request: Request) -> LabelAnswer:
        """The likeliest label of a text, or of a pair of texts, with the probability of each label."""
        row = await asyncio.to_thread(service.check, asked)
        return await run_while_connected(request, service.answer(row), limits)


def _event(name: str, data: dict[str, Any]) -> bytes:
    return format_sse_event(event=name, data_str=json.dumps(data, ensure_ascii=False))
