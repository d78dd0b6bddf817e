"""XLA's options for a step: those of the platform, the user's, and those that a version does not know."""

import logging
import types

import jax
import pytest

from flash_lm.training.compiler_options import OPTIONS, choose_options, compile_for

TPU, GPU, CPU = (types.SimpleNamespace(platform=name) for name in ("tpu", "cuda", "cpu"))


class Lowered:
    """A program whose compiler knows some options only."""

    def __init__(self, known=(), error="INVALID_ARGUMENT: No such compile option: '{}'"):
        self.known, self.error, self.given = {*known}, error, []

    def compile(self, options):
        self.given.append(options)
        if unknown := sorted({*(options or ())} - self.known):
            raise jax.errors.JaxRuntimeError(self.error.format(unknown[0]))
        return options


def test_each_platform_has_its_options(monkeypatch):
    monkeypatch.setattr(jax, "devices", lambda: [GPU])
    assert compile_for(Lowered(OPTIONS["tpu"]), TPU) == OPTIONS["tpu"]
    assert compile_for(Lowered(OPTIONS["gpu"]), GPU) == OPTIONS["gpu"]
    assert compile_for(Lowered(), CPU) is None


def test_what_a_user_sets_counts():
    environment = {"XLA_FLAGS": "--xla_a=1 --xla_gpu_enable_latency_hiding_scheduler=false"}
    assert choose_options("gpu", environment) == {}
    some = {"LIBTPU_INIT_ARGS": "--xla_tpu_overlap_compute_collective_tc=false"}
    assert {*OPTIONS["tpu"]} - {*choose_options("tpu", some)} == {"xla_tpu_overlap_compute_collective_tc"}


def test_an_option_that_a_version_lacks_is_left_out_and_said(caplog):
    lacking = "xla_tpu_overlap_compute_collective_tc"
    program = Lowered({*OPTIONS["tpu"]} - {lacking})
    with caplog.at_level(logging.WARNING, "flash_lm"):
        assert {*OPTIONS["tpu"]} - {*compile_for(program, TPU)} == {lacking}
    assert caplog.messages == [f"this version of XLA has no option {lacking}: it is left out"]
    assert len(program.given) == 2


def test_the_message_is_that_of_xla(monkeypatch, caplog):
    monkeypatch.setitem(OPTIONS, "cpu", {"xla_that_no_version_has": True})
    with caplog.at_level(logging.WARNING, "flash_lm"):
        program = compile_for(jax.jit(lambda x: x + 1).lower(1.0), jax.devices()[0])
    assert float(program(1.0)) == 2
    assert caplog.messages == ["this version of XLA has no option xla_that_no_version_has: it is left out"]


@pytest.mark.parametrize("error", ["RESOURCE_EXHAUSTED: {}", "INVALID_ARGUMENT: No such compile option: 'xla_other'"])
def test_other_errors_are_raised(error):
    with pytest.raises(jax.errors.JaxRuntimeError):
        compile_for(Lowered(error=error), TPU)
