"""Interpreted kernels compared with XLA's versions, at tiny sizes."""

from types import SimpleNamespace

import jax
import pytest

from benchmarks.kernels import __main__ as kernels
from flash_lm.errors import InputError, RunError
from flash_lm.ops.kernels import attention, programs
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")
SMALL = [f"--config.model.{key}={value}" for key, value in {"num_layers": 1, "model_dim": 8, "num_heads": 2}.items()]


def test_the_families_are_those_that_compute_by_a_kernel():
    """Their inputs can be made, and their programs have a kernel; those of gates, the delta rule and softmax not."""
    config = kernels.load_config("configs/tiny.py", [*SMALL, "--config.model.vocab_size=8"])
    families = kernels.with_kernels(config)
    reading = [name for name, row in kernels.FAMILIES.items() if "model.kernels" in row.reads()]
    assert set(reading) - set(families) == {"gla", "gated_deltanet", "mega"}
    for name in families:
        case = kernels.Case(config, name, 16, 32, "float32")
        inputs = jax.eval_shape(lambda case=case: case.inputs("float32"))
        assert "pallas_call" in str(jax.make_jaxpr(case.functions("pallas")[0])(*inputs)), name
    with pytest.raises(InputError, match=f"gla has no kernel here; families that do: {', '.join(families)}"):
        kernels.main(["--config=configs/tiny.py", "--families=flash gla", "--out=/nowhere", *SMALL])


def test_each_family_has_its_lines_before_the_next_and_the_rest_is_named(tmp_path, monkeypatch, capsys):
    """A check takes 10 s of a clock, and so does each length; the second family is checked and not timed."""
    clock, file = [0.0], tmp_path / "kernels.jsonl"

    def check_all(cases):
        clock[0] += 10
        return {case: {"family": case.family, "length": case.length} for case in cases}, {}

    def time_forms(case, *_):
        clock[0] += 10
        return {}

    monkeypatch.setattr(kernels, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(kernels, "check_all", check_all)
    monkeypatch.setattr(kernels, "time_forms", time_forms)
    monkeypatch.setattr(kernels, "product_of_squares", lambda *_: "product")
    words = ["--config=configs/tiny.py", "--lengths=16 32", "--tokens=32", "--config.data.vocab_size=300", *SMALL]
    kernels.main([*words, "--families=flash mamba2 flash_quad", "--seconds=35", f"--out={tmp_path}"])
    assert [(line["family"], line["length"]) for line in read_jsonl(file)] == [("flash", 16), ("flash", 32)]
    left = [f"{name} at {length} tokens" for name in ("mamba2", "flash_quad") for length in (16, 32)]
    assert f"not measured because of --seconds=35: {', '.join(left)}" in capsys.readouterr().out
    assert (tmp_path / "table.md").exists()


@pytest.mark.slow("times kernels")
def test_kernels_against_xlas_versions(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(kernels, "PRODUCT", 64)
    sizes = ["--config.model.gau.shared_dim=8", "--config.model.chunks.size=8", "--config.data.vocab_size=300", *SMALL]
    words = ["--config=configs/tiny.py", "--lengths=16", "--tokens=32", "--rounds=1", "--calls=2", "--families=flash"]
    kernels.main([*words, f"--out={tmp_path / 'out'}", *sizes])
    lines = read_jsonl(tmp_path / "out" / "kernels.jsonl")
    assert [line["family"] for line in lines] == ["flash"]
    for line in lines:
        assert 0 < line["pallas_error"] < 2e-2 and 0 < line["xla_error"] < 2e-2
        rate = line["flops"] / line["pallas_forward_ms"] * 1000
        assert line["forward_fraction"] == pytest.approx(rate / line["product_flops_per_s"])
        assert line["both_speedup"] == pytest.approx(line["xla_both_ms"] / line["pallas_both_ms"])
    assert (tmp_path / "out" / "table.md").read_text().strip() in capsys.readouterr().out


@pytest.mark.slow("compiles kernels")
@pytest.mark.parametrize(("wrong", "message"), [(1.1, "0.1"), (float("nan"), "nan")])
def test_a_kernel_that_differs_is_not_timed(tmp_path, monkeypatch, wrong, message):
    """Changes the sums that only derivatives need; figures of an earlier run do not remain."""
    right = programs.entering_sums
    sums = lambda *words, reverse=False: right(*words, reverse=reverse) * (wrong if reverse else 1)
    monkeypatch.setattr(attention, "entering_sums", sums)
    sizes = ["--config.model.gau.shared_dim=8", "--config.model.chunks.size=8", "--config.data.vocab_size=300", *SMALL]
    words = ["--config=configs/tiny.py", "--lengths=16", "--tokens=32", f"--out={tmp_path / 'out'}", "--families=flash"]
    (tmp_path / "out").mkdir()
    for old in ("kernels.jsonl", "table.md"):
        (tmp_path / "out" / old).write_text("old")
    with pytest.raises(RunError, match=f"are not timed: .*flash at 14 tokens, packed: {message}"):
        kernels.main([*words, *sizes])
    assert not [*(tmp_path / "out").iterdir()]
