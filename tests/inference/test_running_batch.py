"""Rows that join and leave a batch, against each request alone, for every family that decodes."""

import jax
import numpy as np
import pytest

from flash_lm.inference.running_batch import RunningBatch
from flash_lm.inference.sampling import Sampling, SamplingArrays
from inference.test_engine import PROMPTS, each_family, engine

pytestmark = [pytest.mark.representatives("flash"), pytest.mark.group("flash")]

CAPACITY = 32
REQUESTS = [  # prompt, sampling, seed, tokens
    (PROMPTS[1], Sampling(temperature=0), 0, 5),
    (PROMPTS[0], Sampling(temperature=1.3), 4, 8),
    (PROMPTS[2], Sampling(temperature=0.8, top_k=9), 7, 3),
    (PROMPTS[0], Sampling(temperature=0, repetition_penalty=2.0), 1, 6),
    (PROMPTS[1], Sampling(temperature=2.0, top_p=0.9), 2, 7),
]


def generate_alone(
    family: str, prompt: np.ndarray, sampling: Sampling, seed: int, count: int, rows: int = 1
) -> list[int]:
    """The last one of `rows` samples."""
    one = engine(family)
    _, new = one.advance(one.prefill([prompt] * rows, count), SamplingArrays.from_sampling(sampling), seed, count)
    return new.tokens_BxT[rows - 1, : new.lengths_B[rows - 1]].tolist()


def serve(batch: RunningBatch, requests: list, at_a_time: int) -> list[list[int]]:
    """Answers by request number; the next request joins as soon as a row is free."""
    waiting, running, answers = list(enumerate(requests)), {}, [[] for _ in requests]
    while waiting or running:
        while waiting and batch.free:
            number, (prompt, sampling, seed, _) = waiting.pop(0)
            running[batch.join(prompt, sampling, seed)] = number
        for row, part in batch.advance(at_a_time).items():
            number = running[row]
            answers[number] += part.tokens
            if part.ended or len(answers[number]) >= requests[number][3]:
                del answers[number][requests[number][3] :], running[row]
                batch.leave(row)
    return answers


@each_family
def test_each_request_gets_the_answer_of_a_single_request(family):
    """Two rows, five requests: most join a running batch, in the row of one that has left."""
    batch = RunningBatch(engine(family), 2, CAPACITY)
    expected = [generate_alone(family, *request) for request in REQUESTS]
    assert serve(batch, REQUESTS, at_a_time=2) == expected
    assert batch.free == batch.rows == 2


@pytest.mark.slow("compiles three steps at a time")
def test_other_rows_do_not_matter():
    batch = RunningBatch(engine("flash"), 2, CAPACITY)
    (first,) = serve(batch, REQUESTS[1:2], at_a_time=3)
    assert serve(batch, REQUESTS, at_a_time=3)[1] == first


@pytest.mark.slow("compiles for another mesh")
def test_rows_over_devices():
    """Rounded up to a multiple of the devices."""
    batch = RunningBatch(engine("flash", (2, 2, 2)), 3, CAPACITY)
    assert batch.rows == 4
    assert serve(batch, REQUESTS, at_a_time=2) == [generate_alone("flash", *request) for request in REQUESTS]


@pytest.mark.parametrize("family", ["flash", "transformer_plus_plus"])
def test_requests_compile_nothing_after_the_first_ones(family):
    one = engine(family, end=0)  # never drawn: which settings share a batch depends on when rows end
    serve(RunningBatch(one, 2, CAPACITY), REQUESTS, at_a_time=2)
    loop = one._loop
    compiled = (loop.prefill, loop.advance, loop.join, loop.leave, loop.unstack)
    before = [function._cache_size() for function in compiled]
    serve(RunningBatch(one, 2, CAPACITY), [(prompt[:-1], *rest) for prompt, *rest in REQUESTS], at_a_time=2)
    assert [function._cache_size() for function in compiled] == before


@pytest.mark.slow("compiles a batch of four rows")
def test_samples_of_one_prompt_equal_those_of_one_call():
    """The prompt is prefilled once."""
    batch, sampling = RunningBatch(engine("flash"), 4, CAPACITY), Sampling(temperature=1.5)
    rows = [batch.join(PROMPTS[1], sampling, seed=3, number=i) for i in range(3)]
    parts = batch.advance(6)
    for i, row in enumerate(rows):
        assert parts[row].tokens == generate_alone("flash", PROMPTS[1], sampling, 3, 6, rows=i + 1)


def test_a_row_that_was_left_gets_nothing():
    batch = RunningBatch(engine("flash"), 2, CAPACITY)
    rows = [batch.join(prompt, Sampling(temperature=0), 0) for prompt in PROMPTS[:2]]
    batch.leave(rows[0])
    assert set(batch.advance(2)) == {rows[1]} and batch.free == 1
    assert jax.tree.all(jax.tree.map(lambda x: not x.is_deleted(), batch._carry))
