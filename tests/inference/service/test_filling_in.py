"""Masks filled in by the service: with the results of the command, within limits, and in fair order."""

import asyncio
import concurrent.futures
import dataclasses

import pytest

from flash_lm.data.tokenizer import MASK
from flash_lm.errors import InputError
from flash_lm.inference.decode_params import DecodeParams
from flash_lm.inference.fill_in import Filler
from flash_lm.inference.service.metrics import Metrics
from flash_lm.inference.service.requests import FillInAsked
from flash_lm.inference.service.services import FillInService
from flash_lm.training.train_state import ModelFunction
from inference.service.serving import LIMITS, raise_error, random_model, service

pytestmark = pytest.mark.usefixtures("usual_promotion")


def test_filled_masks_equal_those_of_the_command(fill_in):
    """Also for requests that share a batch, with other numbers of candidates."""
    filler = Filler(random_model("fill_in"))
    asked = [{"prompt": f"{'a cat ' * (i % 3)}[MASK] sees", "candidates": 1 + i % 4} for i in range(24)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: fill_in.post("/api/fill_in", json=body).json(), asked))
    for body, answer in zip(asked, answers, strict=True):
        (alone,) = filler([body["prompt"]], body["candidates"])
        assert answer["text"] == alone.text
        for actual, expected in zip(answer["masks"], alone.masks, strict=True):
            assert [one["text"] for one in actual] == [one.text for one in expected]
            assert [one["probability"] for one in actual] == pytest.approx([x.probability for x in expected], rel=1e-3)


def test_masks_of_a_request_are_bounded(fill_in):
    answer = fill_in.post("/api/fill_in", json={"prompt": "[MASK]" * 63})
    assert answer.status_code == 422 and "a prompt of 63 [MASK]s is over the limit of 8 of this service" in answer.text
    assert len(fill_in.post("/api/fill_in", json={"prompt": "[MASK]" * 8}).json()["masks"]) == 8


def test_no_text_to_fill_in_waits_for_a_compiler():
    service = FillInService(random_model("fill_in"), LIMITS, Metrics())
    compiled = [service._filler._features, service._filler._best]
    before = [function._cache_size() for function in compiled]
    for length, masks, candidates in ((1, 1, 1), (20, 5, 16), (55, 8, 7)):
        asked = [FillInAsked(prompt="a" * length + MASK * masks, candidates=candidates)] * 6
        for one in asked:
            service.check(one)

        async def fill_all(asked=asked):
            return await asyncio.gather(*(service.answer(one) for one in asked))

        output = asyncio.run(fill_all())
        assert {len(one.masks) for one in output} == {masks} and {len(one.masks[0]) for one in output} == {candidates}
    assert [function._cache_size() for function in compiled] == before


def test_a_model_that_compiles_each_length_is_not_served():
    trained = random_model("fill_in")
    config = dataclasses.replace(trained.config, model=dataclasses.replace(trained.config.model, normalizer="length"))
    trained = dataclasses.replace(
        trained, config=config, decode_params=DecodeParams(ModelFunction(config.model, seed=1), trained.params)
    )
    with pytest.raises(InputError, match="compiles again for each prompt length.*use flash-lm generate"):
        FillInService(trained, LIMITS, Metrics())


def test_candidates_of_all_masks_are_bounded(fill_in):
    answer = fill_in.post("/api/fill_in", json={"prompt": "[MASK]" * 8, "candidates": 11})
    assert (
        answer.status_code == 422
        and "11 candidates for each of 8 [MASK]s are over the limit of 80 in all" in answer.text
    )
    (mask,) = fill_in.post("/api/fill_in", json={"prompt": "[MASK]", "candidates": 80}).json()["masks"]
    assert len(mask) == 80


def test_small_requests_go_before_large_ones(monkeypatch):
    """A large one waits no longer than that is worth."""
    service, order = FillInService(random_model("fill_in"), dataclasses.replace(LIMITS, rows=1), Metrics()), []
    fill = service.calls_on_all_hosts
    monkeypatch.setattr(
        service, "calls_on_all_hosts", lambda *words: order.append(words[1][0].count(MASK)) or fill(*words)
    )

    async def ask() -> None:
        asked = [FillInAsked(prompt=MASK * masks) for masks in (1, 8, 1, 2)]
        await asyncio.gather(*(service.answer(one) for one in asked))

    asyncio.run(ask())
    assert order == [1, 1, 2, 8]


def test_a_long_text_does_not_pad_the_others(monkeypatch):
    """Many masks do not need much memory, either."""
    filler, shapes, masks = Filler(random_model("fill_in")), [], []
    features, best = filler._features, filler._best
    monkeypatch.setattr(filler, "_features", lambda p, x, s: shapes.append(x.shape) or features(p, x, s))
    monkeypatch.setattr(filler, "_best", lambda *words: masks.append(words[2].shape) or best(*words))
    filler(["a [MASK]"] * 4 + ["long " * 20 + "[MASK]"] + [MASK * 100])
    short, long = sorted(shapes, key=lambda shape: shape[1])[0], max(shape[1] for shape in shapes)
    assert short[1] < long and all(shape[0] <= 4 for shape in shapes) and set(masks) == {(64,)}


@pytest.mark.slow("starts another service")
def test_a_filler_that_fails_is_reported(monkeypatch):
    with service("fill_in") as client:
        monkeypatch.setattr(Filler, "_fill", raise_error)
        for _ in range(2):
            assert client.post("/api/fill_in", json={"prompt": "[MASK]"}).status_code == 500
