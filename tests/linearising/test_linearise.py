"""The command that makes a model linear: its stages, what each of them changes, resuming, and what is refused."""

import json
import pathlib

import jax
import numpy as np
import pytest
from chats import CHATML, chat_tokenizer
from small import write_corpus

import flash_lm
from flash_lm import convert, linearise
from flash_lm.cli import plan_text
from flash_lm.config.experiment import default_config, parse
from flash_lm.errors import InputError, Stopped
from flash_lm.families.family import complete
from flash_lm.inference.model import load_model
from flash_lm.linearising import linearise as linearise_module
from flash_lm.linearising.importance import layer_divergences, most_important, pattern_of
from flash_lm.training import plan
from flash_lm.training.export_folder import flatten_arrays, write_export
from flash_lm.training.train_state import ModelFunction

pytestmark = pytest.mark.usefixtures("usual_promotion")
TEACHER = {
    "family": "transformer_plus_plus",
    "num_layers": 2,
    "model_dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_dim": 24,
    "max_length": 64,
    "norm": "rms",
    "vocab_size": 260,
    "init": "lecun",
}
FAMILIES = ("transformer_plus_plus", "window_linear")
NEW = {f"layers.sublayer_0.core.{name}" for name in ("query_features", "key_features", "window_factor")}


def write_teacher(out: pathlib.Path, seed: int) -> pathlib.Path:
    """An export of random parameters with a chat template."""
    raw, tokenizer = default_config(), chat_tokenizer()
    raw.model.update(TEACHER)
    raw.data.tokenizer = "hf"
    params = ModelFunction(complete(parse(raw).model), seed=seed).init()
    facts = {"corpus": None, "tokenizer": tokenizer.fingerprint, "train_seconds": 0.0}
    write_export(out, flatten_arrays(params, {}), raw.to_dict(), {"run": "x", "step": 0, "facts": facts}, tokenizer)
    return out


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> pathlib.Path:
    return write_teacher(tmp_path_factory.mktemp("models") / "teacher", seed=3)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(teacher, text, workdir: pathlib.Path, *words: str) -> None:
    keys = {"data.path": text, "data.length": 32, "data.tokens_per_batch": 256, "model.window_linear.size": 4}
    keys |= {"model.linear.chunk_size": 8, "data.cache_dir": workdir.parent / "cache", "train.eval_steps": 1}
    linearise.main(
        [
            f"--model={teacher}",
            f"--workdir={workdir}",
            "--transfer_tokens=512",
            "--distil_tokens=512",
            "--softmax_layers=1",
            "--importance_rows=4",
            *(f"--config.{key}={value}" for key, value in keys.items()),
            *words,
        ]
    )


def arrays(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in flatten_arrays(load_model(folder).params, {}).items()}


@pytest.fixture(scope="module")
def finished(teacher, text, tmp_path_factory) -> pathlib.Path:
    workdir = tmp_path_factory.mktemp("linear") / "run"
    run(teacher, text, workdir)
    return workdir


@pytest.mark.slow("trains a converted model in both stages")
def test_stages_change_what_they_train(teacher, finished):
    """The transfer changes new parameters alone, and the distillation those of attention."""
    given, transferred, mixed, distilled = (
        arrays(x) for x in (teacher, *(finished / name for name in ("transfer", "mixed", "distil")))
    )
    start = arrays(finished / "linear")
    assert transferred.keys() - given.keys() == NEW
    changed = lambda before, after: {name for name, x in after.items() if not np.array_equal(x, before[name])}
    assert changed(start, transferred) == NEW and not changed(given, {name: transferred[name] for name in given})
    kinds = {name.rsplit(".", 2)[-2] for name in changed(mixed, distilled)}
    assert kinds == {"query", "key", "value", "output", "core"}
    chosen = json.loads((finished / "layers.json").read_text())
    (layer,) = chosen["softmax"]
    assert chosen["divergences"][layer] == max(chosen["divergences"]) and len(chosen["divergences"]) == 2
    assert load_model(finished / "distil").config.model.pattern == pattern_of([layer], 2, FAMILIES)


@pytest.mark.slow("needs the run of both stages")
def test_the_last_folder_is_a_model_that_chats(finished):
    model = flash_lm.load(finished / "distil")
    assert model.tokenizer.chat_template == CHATML and model.can_chat
    assert isinstance(model.generate("the cat", max_tokens=3, temperature=0), str)
    assert model.config.train.teacher_loss == "distribution"


@pytest.mark.slow("needs the run of both stages")
def test_again_does_nothing_and_other_keys_are_refused(teacher, text, finished, tmp_path, capsys):
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*.safetensors")}
    run(f"{teacher.parent}/../{teacher.parent.name}/teacher", text, finished)  # another name of the same teacher
    assert capsys.readouterr().out.count("all 2 steps are done") == 2
    assert before == {path: path.stat().st_mtime_ns for path in finished.rglob("*.safetensors")}
    with pytest.raises(InputError, match="was begun with other values of model.window_linear.size: give those"):
        run(teacher, text, finished, "--config.model.window_linear.size=5")
    with pytest.raises(InputError, match="was begun with other values of teacher"):
        run(write_teacher(tmp_path / "teacher", seed=4), text, finished)
    with pytest.raises(InputError, match=r"(?s)transfer holds a run of another config.*train.tokens"):
        run(teacher, text, finished, "--transfer_tokens=1k")
    other = tmp_path / "other"
    other.mkdir()
    (other / "file").touch()
    with pytest.raises(InputError, match="is not empty, and not of this command"):
        run(teacher, text, other)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--softmax_layers=2"], "--softmax_layers=2 must be from 0 to 1"),
        (["--config.train.learning_rate=1"], "--config.train.learning_rate is set by the stages: use --transfer_rate"),
        (["--config.model.window_linear.size=30"], "data.length=32 has no tokens beyond the window"),
        (["--config.model.window_linear.linear_attention=False"], "window_linear has no new parameters"),
        (["--distil_rate=0"], "train.learning_rate=0.0 must be more than 0"),
        (["--config.model.family=mc_tfm"], "mc_tfm does not keep layers/sublayer_0/key/kernel, .* as the teacher has"),
        (["--config.data.path=nowhere"], "nowhere"),
        (["--plan", "--hosts=alone"], "--plan is made by one process"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(teacher, text, tmp_path, words, expected):
    with pytest.raises(InputError, match=expected):
        run(teacher, text, tmp_path / "new", *words)
    made = {path.name for path in (tmp_path / "new").glob("*")}
    assert not made or ("nowhere" in expected and made <= {"linearise.json", "linear"})


@pytest.mark.slow("needs the run of both stages")
def test_a_teacher_of_several_families_is_refused(text, finished, tmp_path):
    with pytest.raises(InputError, match="has layers of several families"):
        run(finished / "distil", text, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_plan_writes_nothing(teacher, text, tmp_path, capsys, monkeypatch):
    """Of each stage with tokens; compiling all of them would take long, and `make_plan` has its own tests."""
    planned = []
    monkeypatch.setattr(plan, "make_plan", lambda config, target: planned.append(config))
    monkeypatch.setattr(plan_text, "plan_text", str)
    run(teacher, text, tmp_path / "planned", "--plan", "--plain_tokens=256")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()[::3]] == ["transfer", "distil", "plain"]
    assert [config.train.steps for config in planned] == [2, 2, 1]
    assert [config.model.pattern for config in planned] == [(), (FAMILIES[1], FAMILIES[0]), (FAMILIES[1], FAMILIES[0])]
    assert [config.train.teacher for config in planned] == [str(teacher), str(teacher), None]
    assert not (tmp_path / "planned").exists()


@pytest.mark.slow("trains all stages again, twice")
@pytest.mark.parametrize("stage", ["transfer", "distil"])
def test_a_stopped_run_goes_on_to_the_same_bits(teacher, text, finished, tmp_path, monkeypatch, stage):
    """Stopped after the first step of a stage, and started again."""
    train = linearise_module.train

    def stop_early(config, folder, should_stop):
        return train(config, folder, (lambda: True) if folder.name == stage else should_stop)

    monkeypatch.setattr(linearise_module, "train", stop_early)
    with pytest.raises(Stopped):
        run(teacher, text, tmp_path / "run")
    monkeypatch.setattr(linearise_module, "train", train)
    run(teacher, text, tmp_path / "run")
    for folder in ("transfer", "distil"):
        expected = arrays(finished / folder)
        assert all(np.array_equal(x, expected[name]) for name, x in arrays(tmp_path / "run" / folder).items())


@pytest.mark.slow("needs the run of both stages")
def test_divergences_of_layers(teacher, finished, tmp_path):
    """Each equals the divergence of the model in which that layer alone is converted."""
    row = {
        "inputs_BxL": np.random.default_rng(0).integers(5, 260, 24).astype(np.int32),
        "targets_BxL": np.random.default_rng(1).integers(5, 260, 24).astype(np.int32),
        "segment_ids_BxL": np.ones(24, np.int32),
        "positions_BxL": np.arange(24, dtype=np.int32),
        "loss_mask_BxL": np.ones(24, np.float32),
    }
    before, student = load_model(teacher), load_model(finished / "transfer")
    divergences = layer_divergences(before, student, [row])
    logits = lambda one: jax.jit(lambda params, ids: one.model.bind(params)(ids))(one.params, row["inputs_BxL"][None])
    log_probs = lambda one: jax.nn.log_softmax(logits(one)[0])
    expected = log_probs(before)
    for layer in range(2):
        pattern = ",".join(FAMILIES[i == layer] for i in range(2))
        words = f"--out={tmp_path / str(layer)}", f"--config.model.pattern={pattern}"
        convert.main([f"--model={finished / 'transfer'}", "--config.model.family=transformer_plus_plus", *words])
        actual = log_probs(load_model(tmp_path / str(layer)))
        kl = (np.exp(expected) * (expected - actual)).sum(axis=-1).mean()
        assert divergences[layer] == pytest.approx(kl, rel=1e-3) and kl > 1e-4


def test_the_shortest_pattern():
    assert most_important([0.3, 0.1, 0.3, 0.2], 2) == [0, 2]
    assert pattern_of([0, 2], 4, ("a", "b")) == ("a", "b")
    assert pattern_of([0, 1], 4, ("a", "b")) == ("a", "a", "b", "b")
    assert pattern_of([], 4, ("a", "b")) == ("b",)
