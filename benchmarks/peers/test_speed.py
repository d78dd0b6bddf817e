"""Our step compared with a fake peer that only reports a time."""

import os
import subprocess
import sys

import jax
import pytest
from small import ROOT

from benchmarks.peers import speed
from flash_lm.errors import InputError
from flash_lm.ops.implementations import Implementations
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.timing import turns
from flash_lm.timing.turns import COUNTED

pytestmark = pytest.mark.usefixtures("usual_promotion")
SMALL = [f"--config.model.{key}={value}" for key, value in {"num_layers": 1, "model_dim": 8, "num_heads": 2}.items()]
# Without the settings of a shell or of make, and with these sources.
CLEAN = {k: v for k, v in os.environ.items() if not k.startswith(("GLIBC", "MALLOC"))} | {"PYTHONPATH": str(ROOT)}

FAKE_PEER = """
import json, os, sys
length = 0
for line in sys.stdin:
    asked = json.loads(line)
    length = asked["build"]["length"] if "build" in asked else length
    if "turn" in asked and sys.argv[1] == "sdpa":
        sys.exit(3)
    if length == 64:
        answer = {"error": "ImportError: no such thing"}
    elif "build" in asked:
        answer = {"params": int(os.environ["PARAMS"]) * length // 16, "version": "fake 1", "threads": 1}
        answer |= {"compiled": False, "why_eager": "no compiler"}
    else:
        answer = {"ms": 1000.0}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.slow("starts processes")
def test_peers_take_turns_with_us(tmp_path, monkeypatch, capsys):
    """A peer that has other parameters, cannot be built, or dies gets a line, and the others continue."""
    out = tmp_path / "out"
    monkeypatch.setattr(speed, "WORKER", tmp_path / "peer.py")
    monkeypatch.setattr(speed, "peak_flops", lambda device, dtype: 1e12)
    speed.WORKER.write_text(FAKE_PEER)
    words = ["--config=configs/tiny.py", "--tokens_per_step=64", "--rounds=2", f"--python={sys.executable}", *SMALL]
    config = speed.load_config("configs/tiny.py", [*SMALL, "--config.data.vocab_size=300"])
    (ours,) = speed.make_configs(config, ["flash_pytorch"], [16], tokens_per_step=64, dtype="float32").values()
    monkeypatch.setenv("PARAMS", str(speed.ModelFunction(ours.model, 0).parameter_count()))
    peers = ["--peers=flash_pytorch sdpa", "--lengths=16 32 64", "--config.data.vocab_size=300"]
    speed.main([*words, *peers, f"--out={out}"])
    lines = {(line["peer"], line["length"]): line for line in read_jsonl(out / "peers.jsonl")}
    compared = lines["flash_pytorch", 16]
    assert compared["family"] == "flash" and compared["peer_version"] == "fake 1"
    assert compared["ours_turns"] == 2 * COUNTED
    assert compared["form"] in compared["form_ms"] and compared["form_ms"].keys() == speed.FORMS.keys()
    assert compared["peer_ms"] == 1000 and compared["speedup"] == 1000 / compared["ours_ms"]
    assert "parameters differ by 100.0%" in lines["flash_pytorch", 32]["not_compared"]
    assert lines["flash_pytorch", 64]["not_compared"] == "ImportError: no such thing"
    assert all("speedup" not in line for line in lines.values() if "not_compared" in line)
    assert lines["sdpa", 16]["not_compared"]  # other parameters, or its end
    assert compared["ours_peak_fraction"] / compared["peer_peak_fraction"] == pytest.approx(compared["speedup"])
    assert compared["peer_compiled"] is False and compared["peer_why_eager"] == "no compiler"
    printed = capsys.readouterr().out
    assert "flash_pytorch runs eagerly: no compiler" in printed
    assert (out / "table.md").read_text().strip() in printed
    assert compared["device"] in printed.splitlines()[-2] and compared["threads"] >= 1  # beside the ratios
    assert (out / "peers.png").exists()


def test_a_peer_that_dies_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "WORKER", tmp_path / "peer.py")
    speed.WORKER.write_text(FAKE_PEER)
    with speed.start_peer("sdpa", sys.executable) as peer, pytest.raises(speed.PeerError, match="ended with code 3"):
        speed.ask(peer, {"turn": 1})


def fake_step(monkeypatch, step_ms, fails=()):
    """Our steps take these milliseconds by form, on a clock that they move; some do not fit."""
    clock = [0.0]

    class FakeStep:
        kernels, compile_s, implementations = False, 1.0, Implementations()

        def __init__(self, config):
            self.form, self.config = "scanned" if config.model.scan_layers else "unrolled", config
            clock[0] += 10

        def start(self):
            if self.form in fails:
                raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {self.form}")

        def step(self):
            clock[0] += step_ms[self.form] / 1000

    monkeypatch.setattr(speed, "BareStep", FakeStep)
    monkeypatch.setattr(turns.time, "perf_counter", lambda: clock[0])


@pytest.mark.parametrize(
    ("step_ms", "fails", "end", "form", "tried"),
    [
        ((30, 20), (), 100, "unrolled", {"unrolled", "scanned"}),
        ((20, 30), (), 100, "scanned", {"unrolled", "scanned"}),
        ((20, 30), (), 5, "unrolled", {"unrolled"}),  # the config's own, when the time is over
        ((20, 30), ("scanned",), 100, "unrolled", {"unrolled"}),
    ],
)
def test_our_fastest_form_is_compared(monkeypatch, step_ms, fails, end, form, tried):
    config = speed.load_config("configs/tiny.py", [*SMALL, "--config.data.vocab_size=300"])
    config.model.update(scan_layers=False, remat="full")
    (ours,) = speed.make_configs(config, ["sdpa"], [16], tokens_per_step=64, dtype="float32").values()
    fake_step(monkeypatch, dict(zip(speed.FORMS, step_ms, strict=True)), fails)
    step, facts = speed.fastest_form(ours, end)
    assert (facts["form"], facts["form_ms"].keys()) == (form, tried) and step.form == form
    assert step.config.model.remat == "none"  # as the peers


def test_where_no_form_of_ours_runs_the_first_error_is_raised(monkeypatch):
    config = speed.load_config("configs/tiny.py", [*SMALL, "--config.data.vocab_size=300"])
    config.model.remat = "full"
    (ours,) = speed.make_configs(config, ["sdpa"], [16], keep_remat=True, tokens_per_step=64, dtype="float32").values()
    assert ours.model.remat == "full"
    fake_step(monkeypatch, {}, fails=speed.FORMS)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED: scanned"):
        speed.fastest_form(ours, 100)


@pytest.mark.parametrize(
    ("word", "message"),
    [("--peers=sdpa x", "among sdpa"), ("--python=/nowhere", "make peers"), ("--lengths=0", "positive integers")],
)
def test_peers_of_nonsense_end_before_anything_is_measured(tmp_path, word, message):
    words = ["--config=configs/tiny.py", f"--python={sys.executable}", f"--out={tmp_path / 'out'}"]
    with pytest.raises(InputError, match=message):
        speed.main([*words, word])
    assert not (tmp_path / "out").exists()


def test_both_sides_keep_memory_unless_the_user_has_other_settings():
    """The process that restarts itself, and the one that it starts, have the same settings; the user's win."""
    program = """
import os, subprocess, sys
from benchmarks.lib.allocator import chosen_settings, keep_memory
keep_memory()
print(chosen_settings(os.environ), flush=True)
print(chosen_settings(dict(line.split("=", 1) for line in subprocess.check_output(["env"], text=True).splitlines())))
"""
    run = lambda **more: subprocess.run(
        [sys.executable, "-c", program], env=CLEAN | more, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    ours, theirs = run()
    assert ours == theirs and "trim_threshold" in ours and "hugetlb=1" in ours
    assert run(MALLOC_ARENA_MAX="2") == ["MALLOC_ARENA_MAX=2"] * 2
    # A command of the package that starts the benchmark has huge pages: that is no choice of the user.
    assert run(GLIBC_TUNABLES="glibc.malloc.hugetlb=1", FLASH_LM_HUGE_PAGES="1") == [ours] * 2
