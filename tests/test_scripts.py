"""The benchmarks as a user starts them, at tiny sizes."""

import json
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from oracles import llama as oracle_llama
from safetensors.numpy import load_file, save_file
from small import as_overrides, load_script, small_config, write_corpus

from benchmarks.lib.timing import COUNTED
from flash_lm.errors import InputError, RunError
from flash_lm.ops.kernels import attention, programs
from flash_lm.runs.jsonl import read_jsonl, write_jsonl
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")

SCRIPTS = pathlib.Path(__file__).parent.parent / "scripts"
SMALL = [f"--config.model.{key}={value}" for key, value in {"num_layers": 1, "model_dim": 8, "num_heads": 2}.items()]


@pytest.mark.slow
def test_step_times_of_two_families(tmp_path, monkeypatch, capsys):
    """One line a cell; one that does not fit gets a line, and the rest goes on."""
    script, out = load_script("benchmark_step_time"), tmp_path / "out"
    monkeypatch.setattr(script, "PRODUCT", 64)
    words = ["--size=tiny", "--families=transformer_plus_plus flash", "--lengths=16 32", "--tokens_per_step=64"]
    start = script.BareStep.start

    def exhausted(step) -> None:
        if (step.config.model.family, step.config.data.length) == ("flash", 32):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")
        start(step)

    monkeypatch.setattr(script.BareStep, "start", exhausted)
    script.main([*words, "--rounds=2", f"--out={out}", "--config.data.vocab_size=300", *SMALL])
    lines = read_jsonl(out / "steps.jsonl")
    cells = [(line["length"], line["family"]) for line in lines]
    assert cells == [(n, family) for n in (16, 32) for family in ("transformer_plus_plus", "flash")]
    for line in lines[:3]:
        assert all(not isinstance(value, dict | list) for value in line.values())
        assert line["turns"] == 2 * COUNTED and line["median_ms"] > 0 and line["task"] == "causal_lm"
        assert line["tokens_per_s"] == pytest.approx(64 / line["median_ms"] * 1000)
        assert line["model_flops_per_s"] == pytest.approx(line["model_flops"] / line["median_ms"] * 1000)
        assert line["peak_fraction"] == pytest.approx(line["model_flops_per_s"] / line["peak_flops_per_s"])
    assert lines[0]["speedup"] == 1
    assert "out of memory" in lines[3]["does_not_fit"] and "median_ms" not in lines[3]
    assert len({line["config_hash"] for line in lines}) == 4
    assert (out / "step_time.png").exists()
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out


@pytest.mark.slow
def test_a_family_beside_itself_with_other_keys(tmp_path, monkeypatch, capsys):
    """And no further length once the time is spent."""
    script, out = load_script("benchmark_step_time"), tmp_path / "out"
    monkeypatch.setattr(script, "PRODUCT", 64)
    monkeypatch.setattr(script.time, "perf_counter", iter(range(0, 10**6, 100)).__next__)
    others = ["flash+kernels=pallas+chunks.size=8", "flash+pattern=flash,transformer+num_layers=2"]
    words = ["--size=tiny", f"--families=flash {' '.join(others)}", "--lengths=16 32", "--seconds=60"]
    script.main([*words, "--tokens_per_step=32", "--rounds=1", f"--out={out}", "--config.data.vocab_size=300", *SMALL])
    lines = read_jsonl(out / "steps.jsonl")
    assert [line["family"] for line in lines] == ["flash", *others]
    assert len({line["config_hash"] for line in lines}) == 3
    assert "not run because of --seconds=60: lengths 32" in capsys.readouterr().out


def test_states_stay_while_another_one_takes_its_turn(monkeypatch):
    """So the last of these fits alone, but not with the others."""
    script = load_script("benchmark_step_time")
    monkeypatch.setattr(script, "free_memory", lambda: 100)
    sizes = {"a": (60, 50), "b": (40, 10), "c": (70, 5), "d": (20, 15)}  # peak and temporary bytes
    steps = {
        name: SimpleNamespace(peak_bytes=peak, temp_bytes=temp, start=lambda: None, step=lambda: None)
        for name, (peak, temp) in sizes.items()
    }
    lines: dict[str, dict] = {name: {} for name in sizes}
    assert list(script.warm_up(steps, lines)) == ["a", "b", "d"]
    assert list(lines["c"]) == ["does_not_fit"]


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--families=flash flsh", "flsh"),
        ("--lengths=16 x", "whole numbers"),
        ("--lengths=", "whole numbers"),
        ("--lengths=24", "tokens_per_batch"),
        ("--config.model.dtype=bfloat16", "see --help"),
        ("--config.model.num_layers=0", "num_layers"),
    ],
)
def test_step_times_of_nonsense_end_before_anything_is_measured(tmp_path, word, message):
    words = ["--size=tiny", "--lengths=16", "--tokens_per_step=64", f"--out={tmp_path / 'out'}"]
    with pytest.raises(InputError, match=message):
        load_script("benchmark_step_time").main([*words, word])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_time_of_a_layer_by_length(tmp_path, capsys):
    script, out = load_script("benchmark_layer"), tmp_path / "new" / "out"
    families = ["longformer", "longformer+window.size=4"]
    words = ["--size=tiny", f"--families={' '.join(families)}", "--lengths=16 32", "--tokens_per_step=64"]
    script.main([*words, "--rounds=1", f"--out={out}", *SMALL])
    lines = read_jsonl(out / "layers.jsonl")
    assert [(line["family"], line["length"]) for line in lines] == [(f, n) for f in families for n in (16, 32)]
    for short, long in (lines[:2], lines[2:]):
        assert short["over_shortest"] == 1
        assert long["over_shortest"] == pytest.approx(long["median_ms"] / short["median_ms"])
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "message"), [("--families=linformer", "no causal form"), ("--lengths=16 24", "not a multiple of .*24")]
)
def test_time_of_a_layer_of_nonsense_ends_before_anything_is_measured(tmp_path, word, message):
    out = tmp_path / "out"
    words = ["--size=tiny", "--families=longformer", "--lengths=16", "--tokens_per_step=64", f"--out={out}"]
    with pytest.raises(InputError, match=message):
        load_script("benchmark_layer").main([*words, word])
    assert not out.exists()


@pytest.mark.slow
def test_kernels_beside_what_xla_compiles(tmp_path, monkeypatch, capsys):
    script = load_script("benchmark_kernels")
    monkeypatch.setattr(script, "PRODUCT", 64)
    sizes = ["--config.model.gau.shared_dim=8", "--config.model.chunks.size=8", "--config.data.vocab_size=300", *SMALL]
    words = ["--config=configs/tiny.py", "--lengths=16", "--tokens=32", "--rounds=1", "--calls=2", "--families=flash"]
    script.main([*words, f"--out={tmp_path / 'out'}", *sizes])
    lines = read_jsonl(tmp_path / "out" / "kernels.jsonl")
    assert [line["family"] for line in lines] == ["flash"]
    for line in lines:
        assert 0 < line["pallas_error"] < 2e-2 and 0 < line["xla_error"] < 2e-2
        rate = line["flops"] / line["pallas_forward_ms"] * 1000
        assert line["forward_fraction"] == pytest.approx(rate / line["product_flops_per_s"])
        assert line["both_speedup"] == pytest.approx(line["xla_both_ms"] / line["pallas_both_ms"])
    assert (tmp_path / "out" / "table.md").read_text().strip() in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "found"), [(1.1, "0.1"), (float("nan"), "nan")])
def test_a_kernel_that_differs_is_not_timed(tmp_path, monkeypatch, wrong, found):
    """Here the sums that only derivatives need; figures of an earlier run do not remain."""
    script = load_script("benchmark_kernels")
    right = programs.entering_sums
    sums = lambda *words, reverse=False: right(*words, reverse=reverse) * (wrong if reverse else 1)
    monkeypatch.setattr(attention, "entering_sums", sums)
    sizes = ["--config.model.gau.shared_dim=8", "--config.model.chunks.size=8", "--config.data.vocab_size=300", *SMALL]
    words = ["--config=configs/tiny.py", "--lengths=16", "--tokens=32", f"--out={tmp_path / 'out'}", "--families=flash"]
    (tmp_path / "out").mkdir()
    for old in ("kernels.jsonl", "table.md"):
        (tmp_path / "out" / old).write_text("old")
    with pytest.raises(RunError, match=f"are not timed: .*flash at 14 tokens, packed: {found}"):
        script.main([*words, *sizes])
    assert not [*(tmp_path / "out").iterdir()]


@pytest.mark.slow
def test_memory_of_a_step(tmp_path):
    words = ["--config=configs/tiny.py", "--config.data.tokens_per_batch=64", "--config.model.max_length=32"]
    load_script("benchmark_memory").main(
        [*words, *SMALL, "--config.data.vocab_size=300", f"--out={tmp_path / 'm.jsonl'}"]
    )
    (line,) = read_jsonl(tmp_path / "m.jsonl")
    assert 0 < line["temp_bytes"] < line["peak_bytes"] < line["peak_rss_bytes"]
    json.dumps(line)


@pytest.mark.slow
def test_attention_maps_of_a_run(tmp_path, capsys):
    config = small_config(write_corpus(tmp_path / "text"), tmp_path / "cache")
    config.model.update(pattern=("flash", "aft_local"), num_layers=2)
    train(config, tmp_path / "run")
    script, out = load_script("attention_maps"), tmp_path / "out" / "maps.png"
    script.main([f"--workdir={tmp_path / 'run'}", f"--out={out}", "--tokens=20", "--text=the cat sat on the mat, and"])
    assert "6 maps of 20 tokens" in capsys.readouterr().out  # two parts of two units, and AFT with exp(w)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_perplexity_by_position(tmp_path, capsys):
    """A column for each span, both figures in its cell; a curve for each run."""
    script, file = load_script("plot_positions"), tmp_path / "positions.jsonl"
    names = ("from", "to", "tokens", "perplexity", "perplexity_alone")
    first, second = (dict(zip(names, found, strict=True)) for found in ((0, 256, 9, 200, 200), (256, 512, 9, 150, 190)))
    lines = [
        {"run": "a", "family": "flash", "by_position": [first, second]},
        {"run": "b", "family": "aft_conv", "by_position": [first]},
        {"run": "c", "family": "flash"},
    ]
    write_jsonl(file, lines)
    script.main([str(file), f"--out={tmp_path / 'out'}"])
    table = (tmp_path / "out" / "table.md").read_text()
    assert table.strip() == capsys.readouterr().out.strip()
    assert [line["run"] for line in read_jsonl(tmp_path / "out" / "spans.jsonl")] == ["a", "a", "b"]
    assert "150.0 (190.0)" in table and "256–511" in table and "| c " not in table
    assert (tmp_path / "out" / "positions.png").stat().st_size > 1000
    for name, message in (("none.jsonl", "no file"), ("other.jsonl", "--carry")):
        (tmp_path / "other.jsonl").write_text('{"run": "c"}\n')
        with pytest.raises(InputError, match=message):
            script.main([str(tmp_path / name), f"--out={tmp_path / 'out'}"])


@pytest.mark.slow
def test_decoding_by_context(tmp_path, monkeypatch, capsys):
    """Beside the cached Transformer++ stands the one that recomputes; what does not fit has no time."""
    script, out = load_script("benchmark_decode"), tmp_path / "out"
    monkeypatch.setattr(script, "PREFILLED", 32)
    monkeypatch.setattr(script, "STEPPED", 16)
    monkeypatch.setattr(script, "COPIED", 1 << 12)
    monkeypatch.setattr(script, "RECOMPUTED_UP_TO", 32)
    words = ["--config=configs/tiny.py", "--families=transformer_plus_plus flash", "--contexts=32 64", "--batches=2"]
    sizes = ["--config.model.vocab_size=300", "--config.model.chunks.size=8", *SMALL]
    script.main([*words, *sizes, "--rounds=2", "--tokens=4", f"--out={out}"])
    lines = {(line["family"], line["context"]): line for line in read_jsonl(out / "decode.jsonl")}
    assert set(lines) == {
        (script.RECOMPUTED, 32),
        *((family, context) for family in ("transformer_plus_plus", "flash") for context in (32, 64)),
    }
    assert all(line["ms_a_token"] > 0 and line["turns"] == 2 * COUNTED for line in lines.values())
    state_bytes = {cell: line["state_bytes"] for cell, line in lines.items()}
    assert state_bytes["transformer_plus_plus", 64] > 1.9 * state_bytes["transformer_plus_plus", 32]
    assert state_bytes["flash", 64] == state_bytes["flash", 32]
    for (family, _), line in lines.items():
        if family == script.RECOMPUTED:
            continue
        assert line["bytes_a_token"] == 4 * line["parameters"] + line["state_bytes"]  # neither has tables of positions
        assert line["gb_per_s"] == pytest.approx(line["bytes_a_token"] / line["ms_a_token"] / 1e6)
        assert line["copy_gb_per_s"] > 0
    prefills = read_jsonl(out / "prefill.jsonl")
    assert [line["ratio"] == line["stepping_ms"] / line["prefill_ms"] for line in prefills] == [True, True]
    assert (out / "decode.png").exists()
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out


@pytest.mark.slow
def test_images_a_second(tmp_path, monkeypatch, capsys):
    """Each way and batch; what is recomputed is left out where it is too much."""
    script, out = load_script("benchmark_images"), tmp_path / "out"
    monkeypatch.setattr(script, "PIXELS", {"MNIST": 16})
    monkeypatch.setattr(script, "MOST_RECOMPUTED", 16)
    words = ["--batches=1 2", "--tokens=4", "--rounds=1", "--config.model.chunks.size=8", *SMALL]
    script.main([*words, f"--out={out}"])
    lines = {(line["way"], line["batch"]): line for line in read_jsonl(out / "images.jsonl")}
    assert set(lines) == {(script.RECOMPUTED, 1)} | {(way, n) for way in (script.LINEAR, script.CACHED) for n in (1, 2)}
    for (_, batch), line in lines.items():
        assert line["images_per_s"] == pytest.approx(batch * 1000 / (16 * line["ms_a_pixel"])) and line["turns"] == 2
    assert 1.5 < lines[script.CACHED, 2]["state_mb"] / lines[script.CACHED, 1]["state_mb"] < 2.5
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out
    with pytest.raises(InputError, match="must be among MNIST"):
        script.main(["--images=mnist", f"--out={tmp_path / 'none'}"])
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_service_under_load(tmp_path, capsys, monkeypatch):
    script, out = load_script("benchmark_serve"), tmp_path / "out"
    config = small_config(write_corpus(tmp_path / "text"), tmp_path / "cache")
    config.train.update(steps=4, eval_every=0, checkpoint_every=0)
    config.mesh.shape = (-1, 1, 1)
    train(config, tmp_path / "run")
    words = ["--clients=1 3", "--requests=6", "--tokens=5", "--more=8", f"--workdir={tmp_path / 'run'}"]
    script.main([*words, f"--out={out}"])
    lines = read_jsonl(out / "serve.jsonl")
    assert [(line["clients"], line["requests"]) for line in lines] == [(1, 6), (3, 6)]
    for line in lines:
        assert 0 < line["first_p50_ms"] <= line["p50_ms"] <= line["p99_ms"] and line["resident_mb"] > 50
        assert 0 < line["tokens_per_s"] <= 5 * line["requests_per_s"] * (1 + 1e-9)
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out
    monkeypatch.setattr(script, "EARLY", 4)
    script.main(
        ["--hostile", "--requests=8", "--turns=2", "--tokens=5", f"--workdir={tmp_path / 'run'}", f"--out={out}"]
    )
    *turns, median = read_jsonl(out / "hostile_text.jsonl")
    assert [line["turn"] for line in turns] == [1, 2] and median["turn"] == "median"
    for line in turns:
        assert line["p50_ratio"] == line["p50_ms_beside"] / line["p50_ms_alone"] > 0
    assert median["p99_ratio"] == np.median([line["p99_ratio"] for line in turns])
    with pytest.raises(RunError, match="did not start"):
        script.main([f"--workdir={tmp_path / 'none'}", f"--out={tmp_path / 'no_out'}"])


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
    else:
        answer = {"ms": 1000.0}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.slow
def test_peers_take_turns_with_us(tmp_path, monkeypatch, capsys):
    """One that has other parameters, cannot be built, or dies gets a line, and the rest goes on."""
    script, out = load_script("benchmark_peers"), tmp_path / "out"
    monkeypatch.setattr(script, "WORKER", tmp_path / "peer.py")
    script.WORKER.write_text(FAKE_PEER)
    words = ["--config=configs/tiny.py", "--tokens_per_step=64", "--rounds=2", f"--python={sys.executable}", *SMALL]
    config = script.load_config("configs/tiny.py", [*SMALL, "--config.data.vocab_size=300"])
    (ours,) = script.configs_of(config, ["flash_pytorch"], [16], tokens_per_step=64, dtype="float32").values()
    monkeypatch.setenv("PARAMS", str(script.ModelFunction(ours.model, 0).parameter_count()))
    peers = ["--peers=flash_pytorch sdpa", "--lengths=16 32 64", "--config.data.vocab_size=300"]
    script.main([*words, *peers, f"--out={out}"])
    lines = {(line["peer"], line["length"]): line for line in read_jsonl(out / "peers.jsonl")}
    compared = lines["flash_pytorch", 16]
    assert compared["family"] == "flash" and compared["peer_version"] == "fake 1"
    assert compared["ours_turns"] == 2 * COUNTED
    assert compared["peer_ms"] == 1000 and compared["speedup"] == 1000 / compared["ours_ms"]
    assert "parameters differ by 100.0%" in lines["flash_pytorch", 32]["not_compared"]
    assert lines["flash_pytorch", 64]["not_compared"] == "ImportError: no such thing"
    assert all("speedup" not in line for line in lines.values() if "not_compared" in line)
    assert lines["sdpa", 16]["not_compared"]  # other parameters, or its end
    assert (out / "table.md").read_text().strip() in capsys.readouterr().out
    assert (out / "peers.png").exists()


def test_a_peer_that_dies_is_reported(tmp_path, monkeypatch):
    script = load_script("benchmark_peers")
    monkeypatch.setattr(script, "WORKER", tmp_path / "peer.py")
    script.WORKER.write_text(FAKE_PEER)
    with script.start("sdpa", sys.executable) as peer, pytest.raises(script.PeerError, match="ended with code 3"):
        script.ask(peer, {"turn": 1})


@pytest.mark.parametrize(
    ("word", "message"),
    [("--peers=sdpa x", "among sdpa"), ("--python=/nowhere", "make peers"), ("--lengths=0", "whole")],
)
def test_peers_of_nonsense_end_before_anything_is_measured(tmp_path, word, message):
    words = ["--config=configs/tiny.py", f"--python={sys.executable}", f"--out={tmp_path / 'out'}"]
    with pytest.raises(InputError, match=message):
        load_script("benchmark_peers").main([*words, word])
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_step_benchmark_needs_no_more_than_some_gpu_machines_have():
    """Without the packages of data, checkpoints and logs."""
    missing = ("orbax", "grain", "datasets", "sentencepiece", "tensorboardX", "tqdm")
    program = f"""
import sys
for name in {missing}:
    sys.modules[name] = None
import flash_lm.ops, flash_lm.layers, flash_lm.models.language_model
sys.path.insert(0, "scripts")
import benchmark_step_time
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=SCRIPTS.parent)


@pytest.mark.slow
def test_what_a_step_asks_of_each_device(monkeypatch):
    """A state cut into eight takes an eighth of the bytes, and is gathered; of a whole one gradients are summed."""
    script = load_script("benchmark_scale")
    monkeypatch.setitem(script.SIZES, "tiny", (2, 64, 4))
    config = script.load_config("configs/tiny.py", ["--config.data.vocab_size=512", "--config.model.chunks.size=16"])
    lines = [script.measure(script.setup_of(config, "flash", "tiny", shape, 32, 1)) for shape in ((8, 1, 1), (1, 8, 1))]
    whole, cut = lines
    assert whole["tokens_a_step"] == cut["tokens_a_step"] == 8 * 32 and whole["devices"] == cut["devices"] == 8
    # Parameters and two moments in float32, and some counts.
    assert 12 * whole["parameters"] <= whole["state_bytes_a_device"] < 12 * whole["parameters"] + 64
    assert 12 * cut["parameters"] / 8 <= cut["state_bytes_a_device"] < 0.2 * whole["state_bytes_a_device"]
    assert whole["all-reduce_bytes"] >= 4 * whole["parameters"] and "all-gather_bytes" not in whole
    assert cut["all-gather_bytes"] > 0 and cut["collectives_a_step"] > whole["collectives_a_step"]
    config.train.loss_chunk = 4  # eight slices: the gradient by the table still crosses the devices once
    sliced = script.measure(script.setup_of(config, "flash", "tiny", (8, 1, 1), 32, 1))
    assert sliced["collectives_a_step"] == whole["collectives_a_step"]
    assert sliced["collective_bytes_a_step"] == whole["collective_bytes_a_step"]


@pytest.mark.slow
@pytest.mark.usefixtures("usual_promotion")
def test_what_a_save_costs(tmp_path):
    out = tmp_path / "saves.jsonl"
    words = ["--config=configs/tiny.py", "--config.data.vocab_size=300", "--config.data.tokens_per_batch=4096"]
    load_script("benchmark_save").main([*words, "--rounds=1", f"--out={out}"])
    (line,) = read_jsonl(out)
    assert line["state_bytes"] >= 12 * line["parameters"] and 0 < line["blocked_s"] <= line["written_s"]
    assert line["blocked_share"] == line["blocked_s"] / (line["checkpoint_every"] * line["step_s"])


@pytest.mark.slow
def test_the_first_minute(tmp_path, monkeypatch, capsys):
    """Each round begins in a home that has nothing, and the user's own is left alone."""
    script, out = load_script("benchmark_first_minute"), tmp_path / "out.jsonl"
    monkeypatch.setattr(script, "COMMANDS", ("train",))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    config = as_overrides(small_config(write_corpus(tmp_path / "text"), tmp_path / "tokens", "flash"))
    script.main(["--config=base", "--rounds=1", f"--out={out}", *config])
    lines = read_jsonl(out)
    assert [line.get("case", line.get("command")) for line in lines] == [
        "train",
        "first_run",
        "first_compilation",
        "second_run",
    ]
    assert all(line["rounds_s"] == [line["seconds"]] and line["seconds"] > 0 for line in lines)
    assert lines[0]["until"] == "--help" and "second_run: " in capsys.readouterr().out
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("path", sorted(SCRIPTS.rglob("*.sh")), ids=lambda path: path.name)
def test_shell_scripts_can_be_read(path):
    subprocess.run(["bash", "-n", path], check=True)


def test_llamas_need_the_peers_environment(tmp_path):
    script = load_script("compare_llama")
    with pytest.raises(InputError, match="make peers"):
        script.main([f"--python={tmp_path / 'none'}", f"--out={tmp_path / 'out'}"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("off", [None, "theirs", "again"])
def test_llamas_there_and_back(off, tmp_path, monkeypatch):
    """With the oracle in the place of transformers, which may be wrong."""
    script = load_script("compare_llama")
    small = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    monkeypatch.setattr(script, "SMALL", script.SMALL | small)
    monkeypatch.setattr(script, "SHAPES", {"all share one": {"num_key_value_heads": 1, "dtype": "float32"}})
    monkeypatch.setattr(script, "LENGTH", 12)

    def ask(python, folder, settings=None):
        if settings:
            settings |= {"model_type": "llama", "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 1e4}
            save_file(oracle_llama.draw(settings), folder / "model.safetensors")
            (folder / "config.json").write_text(json.dumps(settings))
        arrays, about = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
        rows, shift = np.load(folder / "ids.npy"), 1e-3 * (folder.name == off)
        text = rows[0]
        for _ in range(script.CONTINUED):
            text = np.append(text, 1 + oracle_llama.logits(arrays, about, text)[-1, 1:].argmax())
        return np.stack([oracle_llama.logits(arrays, about, row) for row in rows]) + shift, text[rows.shape[1] :]

    monkeypatch.setattr(script, "ask", ask)
    words = [f"--python={sys.executable}", f"--out={tmp_path}"]
    if off:
        with pytest.raises(RunError, match="all share one: logits differ"):
            script.main(words)
    else:
        script.main(words)
    (line,) = read_jsonl(tmp_path / "llama.jsonl")
    assert line["same_continuation"]
    assert [way for way in ("import", "export") if line[f"{way}_difference"] > 1e-5] == {
        None: [],
        "theirs": ["import", "export"],  # what both are compared with
        "again": ["export"],
    }[off]
