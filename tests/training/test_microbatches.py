"""The number of microbatches of a run that leaves it open."""

import dataclasses
import logging
import types

import pytest
from hosts_in_threads import run_on_hosts
from hypothesis import given
from hypothesis import strategies as st
from small import small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.errors import InputError
from flash_lm.runs import hosts
from flash_lm.training import device, microbatches
from flash_lm.training.microbatches import fewest_that_fit, fill_microbatches, record
from flash_lm.training.setup import build_experiment
from flash_lm.training.step_memory import Memory, step_memory

pytestmark = pytest.mark.usefixtures("usual_promotion")


@given(st.integers(1, 60), st.integers(1, 500), st.integers(0, 300), st.integers(0, 50), st.integers(1, 20))
def test_the_smallest_divisor_that_fits(rows, room, state, fixed, of_a_row):
    """Against a search of all divisors; temporary arrays have a fixed part and one of each sequence."""

    def memory(count: int) -> Memory:
        temporary = fixed + of_a_row * rows // count
        return Memory(state, temporary, state + temporary)

    divisors = [n for n in range(1, rows + 1) if rows % n == 0]
    expected = next((n for n in divisors if memory(n).total <= room), rows)
    tried = []
    count, found = fewest_that_fit(rows, room, lambda n: tried.append(n) or memory(n))
    assert (count, found) == (expected, memory(expected)) and tried[-1] == count
    assert len(tried) == len({*tried}) <= len(divisors)


def test_what_the_compiler_refuses_does_not_fit():
    refused = lambda count: Memory(1, 8 // count, 9 if count > 1 else None, refused=count < 4)
    assert fewest_that_fit(8, 100, refused)[0] == 4


@pytest.fixture(scope="module")
def experiment(tmp_path_factory):
    """Eight sequences on one device, with an open number of microbatches."""
    folder = tmp_path_factory.mktemp("corpus")
    config = small_config(write_corpus(folder / "text"), folder / "cache", "transformer_plus_plus")
    config.mesh.shape = (8, 1, 1)
    config.data.tokens_per_batch = 64 * config.model.max_length
    return build_experiment(parse(config))


def test_the_memory_is_that_of_the_compiled_step(experiment, caplog):
    """With room for the step in four microbatches, and not in two, there are four."""
    set_to = lambda count: dataclasses.replace(
        experiment,
        config=dataclasses.replace(
            experiment.config, train=dataclasses.replace(experiment.config.train, accumulate=count)
        ),
    )
    two, four = (step_memory(set_to(count)).total for count in (2, 4))
    assert four < two
    with caplog.at_level(logging.INFO, "flash_lm"):
        filled, memory = fill_microbatches(experiment, (four + two) / 2 / 0.95)
    assert filled.config.train.accumulate == 4 and memory.total == four
    assert "train.accumulate is open: 4 microbatches of 2 sequences per device" in caplog.text
    assert fill_microbatches(filled) == (filled, None)


def test_a_small_batch_of_a_cpu_is_whole(experiment, monkeypatch):
    monkeypatch.setattr(microbatches, "step_memory", lambda setup: pytest.fail("nothing is to be compiled"))
    filled, memory = fill_microbatches(experiment)
    assert (filled.config.train.accumulate, memory) == (1, None)


def test_a_large_batch_of_a_cpu_depends_on_free_memory(experiment, monkeypatch):
    """Eight simulated devices share the memory of the machine."""
    monkeypatch.setattr(microbatches, "_FEW_TOKENS", 0)
    monkeypatch.setattr(microbatches, "free_memory", lambda: 8 * 100 / 0.95)
    total = lambda setup: 20 + 160 // setup.config.train.accumulate
    monkeypatch.setattr(microbatches, "step_memory", lambda setup: Memory(20, total(setup) - 20, total(setup)))
    assert fill_microbatches(experiment)[0].config.train.accumulate == 2


def test_a_run_continues_with_as_many_on_the_same_devices(experiment, monkeypatch):
    monkeypatch.setattr(microbatches, "step_memory", lambda setup: pytest.fail("nothing is to be compiled"))
    known = {"count": 4, "rows": 8, "device": "cpu"}
    filled, memory = fill_microbatches(experiment, known=known)
    assert (filled.config.train.accumulate, memory) == (4, None) and record(filled) == known
    # On other devices the number is chosen again.
    for other in ({"rows": 16}, {"device": "TPU v5e"}):
        assert fill_microbatches(experiment, known=known | other)[0].config.train.accumulate == 1


def test_runs_that_are_trained_together_share_the_memory(experiment, monkeypatch):
    total = lambda setup: 20 + 160 // setup.config.train.accumulate
    monkeypatch.setattr(microbatches, "step_memory", lambda setup: Memory(20, total(setup) - 20, total(setup)))
    count = lambda runs: fill_microbatches(experiment, 200 / 0.95, runs=runs)[0].config.train.accumulate
    assert [count(runs) for runs in (1, 2, 4)] == [1, 2, 8]


def test_free_memory_is_that_of_this_host(monkeypatch):
    """The first of all devices may be another host's, which does not say what is free."""
    mine = types.SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 9, "bytes_in_use": 2})
    theirs = types.SimpleNamespace(platform="gpu", memory_stats=lambda: pytest.fail("it belongs to another host"))
    monkeypatch.setattr(device.jax, "devices", lambda: [theirs, mine])
    monkeypatch.setattr(device.jax, "local_devices", lambda: [mine])
    assert device.free_memory() == 7


def test_all_hosts_choose_alike(experiment, monkeypatch):
    """One host has less memory, and another one's compiler needs more."""
    monkeypatch.setattr(microbatches, "_FEW_TOKENS", 0)

    host = lambda: hosts.jax.process_index()

    def memory(setup) -> Memory:
        temporary = (120 + 40 * (host() == 1)) // setup.config.train.accumulate
        return Memory(20, temporary, 20 + temporary)

    monkeypatch.setattr(microbatches, "step_memory", memory)
    monkeypatch.setattr(microbatches, "free_memory", lambda: 8 * (150 - 50 * host()) / 0.95)
    choose = lambda number: fill_microbatches(experiment)[0].config.train.accumulate
    assert run_on_hosts(monkeypatch, 2, choose) == [2, 2]


def test_a_batch_that_devices_cannot_share(experiment):
    data = dataclasses.replace(experiment.config.data, tokens_per_batch=12 * experiment.config.data.length)
    odd = dataclasses.replace(experiment, config=dataclasses.replace(experiment.config, data=data))
    with pytest.raises(InputError, match="must be a multiple of data x fsdp x train.accumulate = 8: raise"):
        fill_microbatches(odd)
