"""The choice among implementations of softmax attention: by request, platform, dtype and mask, with faked backends."""

import logging

import jax
import pytest

from flash_lm.errors import InputError
from flash_lm.ops import implementations
from flash_lm.ops.fused_attention import LIBRARIES
from flash_lm.ops.implementations import recorded, report
from flash_lm.ops.softmax_choice import check_request, choose_softmax
from ops.test_fused_attention import fake_cudnn, shapes, structure_of  # noqa: F401 (a fixture)


def choose(requested: str, platform: str, monkeypatch, form: str = "causal", *, structured: bool = True, **changes):
    """The choice, and what is said about it; `changes`: `dtype`, `width` of the arrays, `trains`."""
    trains = changes.pop("trains", True)
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    key_span, structure = structure_of(form)
    with recorded() as said:
        chosen = choose_softmax(
            requested, *shapes(**changes), key_span, structure if structured else None, trains=trains
        )
    (sentence,) = said["softmax attention"]
    return chosen, sentence


@pytest.mark.parametrize(
    ("requested", "platform", "expected"),
    [
        ("auto", "cpu", "blocked"),
        ("auto", "tpu", "splash"),
        ("auto", "gpu", "cudnn"),
        ("blocked", "gpu", "blocked"),
        ("plain", "tpu", "blocked"),  # the caller's name for what XLA compiles
        ("splash", "tpu", "splash"),
        ("cudnn", "gpu", "cudnn"),
    ],
)
def test_auto_is_the_fastest_of_the_platform(requested, platform, expected, monkeypatch, fake_cudnn):  # noqa: F811
    asked = ", as model.quadratic.implementation says" if requested in ("plain", "blocked") else ""
    assert choose(requested, platform, monkeypatch) == (expected, expected + asked)


@pytest.mark.parametrize(
    ("platform", "changes", "reason"),
    [
        ("gpu", {"dtype": "float32"}, "blocked, not cudnn: it needs model.dtype=bfloat16, and this is float32"),
        ("gpu", {"width": 520}, "blocked, not cudnn: The head dim must be"),
        ("gpu", {"form": "window_both_ways"}, "blocked, not cudnn: cuDNN doesn't support right window"),
        ("tpu", {"structured": False}, "blocked, not splash: it cannot take"),
    ],
    ids=str,
)
def test_auto_falls_back_in_words(platform, changes, reason, monkeypatch, fake_cudnn):  # noqa: F811
    chosen, sentence = choose("auto", platform, monkeypatch, **changes)
    assert chosen == "blocked"
    assert sentence.startswith(reason)
    # A request is an error instead; but not for the pieces of a prompt.
    name = "cudnn" if platform == "gpu" else "splash"
    with pytest.raises(InputError, match=rf"implementation={name} cannot compute this: .*; set .*=auto"):
        choose(name, platform, monkeypatch, **changes)
    assert choose(name, platform, monkeypatch, **changes, trains=False) == (chosen, sentence)


def test_without_cudnn_a_gpu_uses_blocks(monkeypatch):
    assert choose("auto", "gpu", monkeypatch) == ("blocked", "blocked, not cudnn: cuDNN is not detected.")


def test_packing_says_what_its_mask_costs(monkeypatch, fake_cudnn):  # noqa: F811
    assert choose("auto", "gpu", monkeypatch, "packed", dtype="bfloat16") == (
        "cudnn",
        "cudnn, with a mask of all pairs, 0.7 MB",  # 5 bytes for 256² pairs of two sequences
    )
    assert choose("auto", "tpu", monkeypatch, "packed") == ("splash", "splash")


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_request_is_checked_when_the_model_is_built(name, monkeypatch):
    with pytest.raises(InputError, match=f"implementation={name} cannot compute this: it is for softmax.* relu2"):
        check_request(name, "relu2", has_bias=False)
    with pytest.raises(InputError, match="softmax with a bias"):
        check_request(name, "softmax", has_bias=True)
    if LIBRARIES[name].platform is not None:
        with pytest.raises(InputError, match="and this is a CPU; set .*=auto"):
            check_request(name, "softmax", has_bias=False)
    check_request("auto", "relu2", has_bias=True)


def test_what_is_not_recorded_is_logged_once(caplog):
    implementations._say.cache_clear()
    with caplog.at_level(logging.INFO, logger="flash_lm"):
        report("attention", "blocked")
        report("attention", "blocked")
        with recorded() as said:
            report("attention", "cudnn")
            report("sums", "by XLA")
            report("attention", "blocked")
            report("attention", "cudnn")
    assert [record.getMessage() for record in caplog.records] == ["attention: blocked"]
    assert said.line() == {"implementations": "attention: cudnn and blocked; sums: by XLA"}
    assert not implementations.Implementations().line()
