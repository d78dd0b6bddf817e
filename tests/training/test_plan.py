"""`train --plan`: its figures against arithmetic on shapes, its lines, and what it refuses."""

import dataclasses

import jax
import pytest
from flax import nnx
from small import config_names, override_flags, small_config, write_corpus

from flash_lm import train
from flash_lm.cli.load import load_config
from flash_lm.cli.plan_text import plan_text
from flash_lm.config.experiment import parse
from flash_lm.errors import InputError
from flash_lm.models.language_model import LanguageModel
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training import ahead_of_time, plan, step_memory
from flash_lm.training.chips import CHIPS
from flash_lm.training.plan import Target, make_plan, parse_target, plan_config
from flash_lm.training.setup import build_experiment
from flash_lm.training.step_memory import Memory

pytestmark = pytest.mark.usefixtures("usual_promotion")

LENGTH, WIDTH, VOCAB = 32, 16, 260


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def config(corpus, tmp_path_factory):
    config = small_config(corpus, tmp_path_factory.mktemp("cache"))
    config.train.steps = 1000
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run that does not exist."""
    return tmp_path_factory.mktemp("runs") / "new"


@pytest.fixture
def no_compiler(monkeypatch):
    monkeypatch.setattr(ahead_of_time.importlib.util, "find_spec", lambda name: None)


@pytest.mark.parametrize(
    ("count", "shape"),
    [
        (1, (2, 2)),
        (2, (2, 2)),
        (4, (2, 2)),
        (8, (2, 4)),
        (16, (4, 4)),
        (64, (8, 8)),
        (256, (16, 16)),
        (6, None),
        (12, None),
    ],
)
def test_slices_of_tpus(count, shape):
    assert ahead_of_time.tpu_shape(count) == shape


@pytest.fixture
def command(monkeypatch, tmp_path, capsys):
    """Runs `train` with these words in an empty folder; returns its output, and checks that nothing was written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flash_lm.cli.compile_cache.compile_without_cache", lambda: None)

    def run(*words: str) -> str:
        train.main([*words])
        assert not list(tmp_path.iterdir())
        return capsys.readouterr().out

    return run


def target(count: int = 1, **changes) -> Target:
    """Some of the simulated devices, under the name of a chip."""
    return Target("H200", count, tuple(jax.devices()[:count]), True, 1e9, **changes)


def change(config, **keys):
    config = config.copy_and_resolve_references()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in keys.items()})
    return config


def parameters(made) -> list[tuple[int, ...]]:
    """The shapes of the parameters of a model that is really made; those of a layer without the layers' dimension."""
    model = LanguageModel(made.config.model, rngs=nnx.Rngs(0))
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    return [x.shape[1:] if path[0].key == "layers" else x.shape for path, x in leaves]


def size(shape) -> int:
    return shape[0] * size(shape[1:]) if shape else 1


def test_the_figures_of_a_plan(config, run):
    made = make_plan(plan_config(change(config, mesh__shape=(1, 2, 1)), run, 2), target(2))
    shapes = parameters(made)
    assert made.parameters == sum(map(size, shapes))
    # Parameters and two moments in float32; matrices are halved. The step and the optimizer's counters are as small.
    halved = sum(size(shape) // (1 + (len(shape) > 1)) for shape in shapes)
    assert 0 < made.memory.state - 12 * halved <= 16
    # Four sequences of the four arrays that the step reads, four bytes each; the rest are outputs, a few numbers.
    rest = made.memory.total - made.memory.temporary - made.memory.state
    assert made.rows == 4 and 0 <= rest - 4 * LENGTH * 4 * 4 < 512
    # Two FLOPs for each weight of a matrix, with the embedding as the head's, and for each pair of tokens that
    # attention sees, for scores and values; the gradients are twice as many.
    assert (VOCAB, WIDTH) in shapes
    weights, pairs = sum(size(shape) for shape in shapes if len(shape) > 1), (LENGTH + 1) / 2
    assert made.step_flops == pytest.approx(3 * 256 * (2 * weights + 4 * WIDTH * pairs))
    assert made.flops == 1000 * made.step_flops
    assert made.fits and dataclasses.replace(made, target=target(2, fraction=1)).peak == 494e12

    # On one device of a chip without a compiler.
    alone = make_plan(plan_config(config, run, 1), parse_target("L4"))
    assert 0 < alone.memory.state - 12 * made.parameters <= 16 and alone.memory.total is None and alone.fits is None


def test_the_lines_of_the_command(config, command, no_compiler):
    words = [x for x in override_flags(config) if "cache_dir" not in x]
    out = command("--config=quickstart", *words, "--plan=TPU v5e:4").splitlines()
    assert out[0].startswith("model        transformer_plus_plus, 1 layers x 16, ") and out[0].endswith(" parameters")
    assert out[1] == "batch        256 tokens per step: 8 sequences x 32, in as few microbatches as fit"
    assert out[2] == "run          1,000 steps, 256,000 tokens"
    assert out[4] == "devices      4 x TPU v5e; mesh: data 4 x fsdp 1 x tensor 1"
    assert out[7] == "  temporary  not known: no compiler for TPU v5e: install it with pip install libtpu"
    assert out[8] == "  in total   at least the state, of 16.0 GB: not known whether it fits"
    assert [line.split()[:3] for line in out[10:]] == [["at", share, "%"] for share in ("15", "30", "45")]


def test_without_a_chip_the_devices_are_those_of_this_machine(config, run, command, monkeypatch):
    monkeypatch.setattr(plan, "step_memory", lambda setup: Memory(2_000_000, 3_000_000, 5_000_000))
    monkeypatch.setattr(plan, "free_memory", lambda: 8_000_000_000)
    words = [x for x in override_flags(config) if "cache_dir" not in x]
    out = command("--config=quickstart", *words, "--plan")
    assert "devices      8 x cpu, of this machine; mesh: data 8" in out
    assert "in total   5.0 MB, of 1.0 GB that are free: fits" in out
    assert "time         no estimate: no peak rate of cpu in float32 is known" in out


@pytest.mark.parametrize(
    ("message", "temporary", "total"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (33.5G) exceeds available HBM (15.75G). HLO module: jit_step.",
            33.5 * 2**30,
            None,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 20.1G of 15.75G hbm.", None, 20.1 * 2**30),
    ],
)
def test_a_step_that_the_compiler_refuses(config, run, monkeypatch, message, temporary, total):
    def refuse(lowered, device):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(step_memory, "compile_for", refuse)
    chip = dataclasses.replace(target(), name="TPU v5e", is_here=False, memory=16e9)
    made = make_plan(plan_config(config, run, 1), chip)
    state = made.memory.state
    assert made.fits is False
    assert made.memory.temporary == pytest.approx(temporary or total - state, abs=1)
    assert made.memory.total == pytest.approx(total or temporary + state, abs=1)
    assert f"{made.memory.total / 1e9:.1f} GB, of 16.0 GB: does not fit; in this order try " in plan_text(made)


def test_another_error_of_the_compiler_is_raised(config, run, monkeypatch):
    def fail(lowered, device):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.")

    monkeypatch.setattr(step_memory, "compile_for", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="vmem"):
        make_plan(plan_config(config, run, 1), dataclasses.replace(target(), is_here=False))


def test_the_advice(config, run, no_compiler):
    # Eight sequences; a GPU gives programs three quarters of 80 GB, and 76 GB at most.
    made = make_plan(plan_config(config, run, 1), parse_target("H100"))
    needs = lambda state, temporary, **keys: dataclasses.replace(
        made, memory=Memory(state, temporary, state + temporary), **keys
    ).advice()
    assert needs(10**10, 5 * 10**10 + 1)[:3] == [
        "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95",
        "--config.model.remat=products",
        "--config.train.accumulate=2",
    ]
    assert needs(10**10, 16 * 10**10)[:2] == ["--config.model.remat=products", "--config.train.accumulate=4"]
    # A state that is too large is not helped by smaller steps.
    assert needs(7 * 10**10, 10**10) == ["more devices with fsdp"]
    eight = {"target": dataclasses.replace(made.target, count=8), "mesh": {"data": 8, "fsdp": 1, "tensor": 1}}
    assert needs(7 * 10**10, 10**10, **eight)[0] == "--config.mesh.shape=1,-1,1 (fsdp)"


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"task": "masked_lm"},
        {"data__tokenizer": "sentencepiece", "data__vocab_size": 330},
        {"data__corpus": "copy", "data__pack": "examples"},
        {"data__corpus": "needle", "data__pack": "examples", "data__length": 256, "model__max_length": 256},
        {"data__corpus": "listops", "data__pack": "examples", "task": "classify", "data__length": 2048}
        | {"model__max_length": 2048, "data__tokens_per_batch": 16384},
    ],
)
def test_the_sizes_are_those_that_the_corpus_defines(config, run, keys):
    changed = change(config, **keys, **({"data__tokens_per_batch": 2048} if "data__length" not in keys else {}))
    if keys.get("data__length") == 256:
        changed.data.tokens_per_batch = 2048
    assert plan_config(changed, run, 8).model == build_experiment(parse(changed)).config.model


@pytest.mark.parametrize("name", [name for name in config_names() if name != "couplets"])
def test_every_config_can_be_planned(name, run):
    assert plan_config(load_config(name, []), run, 1).model.vocab_size


def test_an_open_batch_depends_on_the_devices_of_the_plan(config, run):
    planned = plan_config(change(config, data__tokens_per_batch=None), run, 640)
    assert planned.data.batch_size == 640 and planned.mesh.shape == (640, 1, 1)


def test_open_keys_are_those_of_the_run_in_the_folder(config, tmp_path):
    RunFolder(tmp_path).write(change(config, model__vocab_size=300))
    files = set(tmp_path.iterdir())
    assert plan_config(config, tmp_path, 1).model.vocab_size == 300
    with pytest.raises(InputError, match="holds a run of another config"):
        plan_config(change(config, model__num_layers=2), tmp_path, 1)
    assert set(tmp_path.iterdir()) == files


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"data__corpus": "couplets", "data__pack": "examples"}, "config.model.vocab_size="),
        ({"data__corpus": "images", "data__pack": "examples", "task": "classify"}, "config.model.classes.count="),
        ({"train__init_from": "hub:owner/name"}, "a plan downloads nothing"),
        ({"mesh__shape": (3, 1, 1)}, "must make 1, the number of devices"),
        ({"model__num_layers": 0}, "num_layers"),
    ],
)
def test_a_config_that_cannot_be_planned(config, run, keys, message):
    with pytest.raises(InputError, match=message):
        plan_config(change(config, **keys), run, 1)


def test_the_sizes_that_only_the_corpus_has_can_be_set(config, run):
    images = {"data__corpus": "images", "data__pack": "examples", "task": "classify"}
    assert plan_config(change(config, **images, model__classes__count=10), run, 1).model.vocab_size == VOCAB


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--plan=H300"], f"H300 is not in the table of chips: give one of {', '.join(CHIPS)}"),
        (["--plan=H200:0"], "give CHIP:COUNT with a positive number of devices, such as H200:8"),
        (["--plan", "--hosts=auto"], "leave --hosts out, and give --plan=CHIP:COUNT"),
        (["--plan=L4:16", "--config.data.tokens_per_batch=512"], "must be a multiple of data x fsdp"),
        (["--plan=L4", "--config.model.widht=2"], "widht"),
    ],
)
def test_what_the_command_refuses(command, words, message):
    with pytest.raises(InputError, match=message):
        command("--config=quickstart", *words)
