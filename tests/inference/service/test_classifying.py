"""Labels from the service equal those of `classify` in Python, also if requests share a batch."""

import concurrent.futures

import pytest

from flash_lm.inference.classify import ROWS, TextClassifier
from flash_lm.inference.service.metrics import Metrics
from flash_lm.inference.service.requests import LabelAsked
from flash_lm.inference.service.services import LabelService
from inference.service.serving import LABELS, LIMITS, raise_error, random_model, service

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module", params=["labels", "label_pairs"])
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def client(kind):
    with service(kind) as client:
        yield client


def test_labels_equal_those_of_python(client, kind):
    """Also of requests that share a batch, and of truncated texts."""
    pairs = [("a cat sees", "a dog"), *(("x" * 2 * i, "y" * (40 - 2 * i)) for i in range(1, 20))]
    texts = [pair[: 1 + (kind == "label_pairs")] for pair in pairs]
    model = random_model(kind)
    expected = model.classify([pair if kind == "label_pairs" else pair[0] for pair in texts])
    bodies = [dict(zip(("text", "pair"), pair, strict=False)) for pair in texts]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda body: client.post("/api/classify", json=body).json(), bodies))
    for answer, alone in zip(answers, expected, strict=True):
        probabilities = {one["label"]: one["probability"] for one in answer["labels"]}
        assert probabilities == pytest.approx(alone, rel=1e-4) and set(probabilities) == set(LABELS)
        assert answer["label"] == answer["labels"][0]["label"] == max(probabilities, key=probabilities.get)
        assert sum(probabilities.values()) == pytest.approx(1, abs=1e-5)
    sizes = [sum(len(text) + 2 for text in pair) for pair in texts]  # bytes, begin and end
    assert [x["left_out"] for x in answers] == [max(0, size - model.config.data.length) for size in sizes]
    assert len({round(answer["labels"][0]["probability"], 5) for answer in answers}) > 5  # they depend on the text


def test_bad_input_is_reported(client, kind):
    wrong = {"text": "a"} if kind == "label_pairs" else {"text": "a", "pair": "b"}
    answer = client.post("/api/classify", json=wrong)
    kinds = {"labels": "single texts", "label_pairs": "pairs of texts"}
    assert answer.status_code == 422 and f"predicts labels of {kinds[kind]}: give them" in answer.text
    answer = client.post("/api/classify", json={"text": "a" * 1000})
    assert answer.status_code == 422 and "over the limit of 64 tokens of this service" in answer.text
    assert client.get("/api/model").json()["kind"] == kind and client.get("/health").status_code == 200


def test_nothing_waits_for_a_compiler():
    service = LabelService(random_model("labels"), LIMITS, Metrics())
    compiled = service._classifier._probabilities
    before = compiled._cache_size()
    for count in (1, 2, ROWS, ROWS + 1):
        rows = [service.check(LabelAsked(text="a" * i)).tokens for i in range(1, count + 1)]
        assert len(service._classify(rows)) == count
    assert compiled._cache_size() == before


@pytest.mark.slow("starts another service")
def test_a_classifier_that_fails_is_reported(monkeypatch):
    with service("labels") as client:
        monkeypatch.setattr(TextClassifier, "_classify_batch", raise_error)
        for _ in range(2):
            assert client.post("/api/classify", json={"text": "a"}).status_code == 500
