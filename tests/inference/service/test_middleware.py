"""Delays of refusals, and their cost for other requests."""

import asyncio
from types import SimpleNamespace

import pytest

from flash_lm.inference.service import middleware
from flash_lm.inference.service.middleware import REFUSALS_A_SECOND, RefusalDelay


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """The delays of the answers, with a clock that stands still."""
    delays: list[float] = []

    async def sleep(seconds: float) -> None:
        delays.append(seconds)

    # In this module alone: the event loops of the services that other tests share keep their clock.
    monkeypatch.setattr(middleware, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(middleware, "time", SimpleNamespace(monotonic=lambda: 100.0))
    return delays


def answer(app: RefusalDelay, times: int) -> list[int]:
    """Statuses that a client receives."""
    seen: list[int] = []

    async def send(message) -> None:
        if message["type"] == "http.response.start":
            seen.append(message["status"])

    async def ask() -> None:
        for _ in range(times):
            await app({"type": "http"}, lambda: None, send)  # type: ignore[arg-type]

    asyncio.run(ask())
    return seen


def make_app(status: int) -> RefusalDelay:
    async def app(scope, receive, send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    return RefusalDelay(app)


def test_a_burst_of_refusals_is_answered_at_once_and_later_ones_at_a_fixed_rate(waits):
    assert set(answer(make_app(422), REFUSALS_A_SECOND)) == {422}
    assert waits == [0.0] * REFUSALS_A_SECOND
    del waits[:]
    app = make_app(413)
    answer(app, REFUSALS_A_SECOND + 4)
    assert waits[-4:] == pytest.approx([(i + 1) / REFUSALS_A_SECOND for i in range(4)])


def test_no_refusal_waits_longer_than_a_second(waits):
    answer(make_app(400), 100 * REFUSALS_A_SECOND)
    assert max(waits) == pytest.approx(1.0)


@pytest.mark.parametrize("status", [200, 503])
def test_other_answers_are_never_delayed(waits, status):
    assert answer(make_app(status), 100) == [status] * 100
    assert not waits
