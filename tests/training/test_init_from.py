"""Runs that start from the parameters of another model, and frozen parameters."""

import functools
import shutil

import jax
import numpy as np
import optax
import pytest
from flax.traverse_util import flatten_dict
from small import small_config, write_corpus

import flash_lm
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.config.registry import OPTIMIZERS
from flash_lm.data.tokenizer import CharacterTokenizer
from flash_lm.data.tokenizers import save_tokenizer
from flash_lm.errors import InputError
from flash_lm.families.family import complete
from flash_lm.inference.export import export
from flash_lm.inference.model import load_model
from flash_lm.inference.scoring import evaluate
from flash_lm.layers.parameter import Traits, parameter_name
from flash_lm.runs.run_name import run_name
from flash_lm.training.checkpoint_read import restore
from flash_lm.training.frozen import frozen_mask
from flash_lm.training.init_from import parent_tokenizer
from flash_lm.training.optimizer import make_optimizer
from flash_lm.training.resolve import fill_from_parent
from flash_lm.training.schedule_free import gradient_point
from flash_lm.training.setup import build_experiment
from flash_lm.training.train_loop import train
from flash_lm.training.train_state import ModelFunction
from training.runs import losses, stop_after

pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture(scope="module")
def config(tmp_path_factory, usual_promotion):
    folder = tmp_path_factory.mktemp("corpus")
    config = small_config(write_corpus(folder / "text"), folder / "cache")
    config.model.update(absolute_positions="learned", num_layers=2)
    config.train.update(steps=2, warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0)
    return config


@pytest.fixture(scope="module")
def parent(config, tmp_path_factory):
    """A run of a masked language model."""
    workdir = tmp_path_factory.mktemp("runs") / "parent"
    train(apply_changes(config, {"task": "masked_lm"}), workdir)
    return workdir


def arrays(run) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in flatten_dict(flash_lm.load(run).params, sep=".").items()}


def initial_params(config, workdir, **keys) -> dict[str, np.ndarray]:
    """The parameters before the first step of a run with these keys; the run stops after that step."""
    train(
        apply_changes(config, {key.replace("__", "."): x for key, x in keys.items()}),
        workdir,
        should_stop=stop_after(1),
    )
    return arrays(f"{workdir}@0")


@pytest.mark.slow("trains and scores two runs with a parent, each with a resume")
def test_another_objective_begins_with_the_same_parameters(config, parent, tmp_path):
    """Also from its export. The run records its parent, and no longer needs it."""
    theirs = arrays(parent)
    export(load_model(parent), tmp_path / "exported", "mit")
    for source in (shutil.copytree(parent, tmp_path / "copy"), tmp_path / "exported"):
        child = tmp_path / f"from_{source.name}"
        initial = initial_params(config, child, train__init_from=str(source), data__length=16)
        assert initial.keys() == theirs.keys() and all(np.array_equal(initial[name], theirs[name]) for name in theirs)
        shutil.rmtree(source)
        train(apply_changes(config, {"train.init_from": str(source), "data.length": 16}), child)
        (line,) = evaluate(child, "test")
        whose = parent if source.name == "exported" else source  # an export names its run
        assert line["parent_run"] == whose.name and line["parent_step"] == 2 and line["step"] == 2
        assert not any(np.array_equal(x, theirs[name]) for name, x in arrays(child).items() if "kernel" in name)
    assert losses(tmp_path / "from_copy") == losses(tmp_path / "from_exported")


@pytest.mark.slow("trains two runs with a parent")
def test_new_parameters_are_drawn_and_unused_ones_are_left_out(config, parent, tmp_path, capsys):
    theirs = arrays(parent)
    untied = initial_params(config, tmp_path / "untied", train__init_from=str(parent), model__tie_embeddings=False)
    (new,) = untied.keys() - theirs.keys()
    np.testing.assert_allclose(
        untied[new], flatten_dict(load_model(tmp_path / "untied").model.init(), sep=".")[new], atol=1e-6
    )
    assert all(np.array_equal(untied[name], theirs[name]) for name in theirs)
    assert f"initialised: {new}" in capsys.readouterr().out
    tied = initial_params(config, tmp_path / "tied", train__init_from=f"{tmp_path / 'untied'}@0")
    assert new not in tied and f"left out: {new}" in capsys.readouterr().out


@pytest.mark.slow("trains a run of longer sequences")
def test_positions_of_another_length(config, parent, tmp_path):
    longer = {"model__max_length": 47, "data__length": 32, "train__init_from": str(parent)}
    with pytest.raises(InputError, match=r"positions/table \[32, 16\] there, \[47, 16\] here.*init_positions=interp"):
        initial_params(config, tmp_path / "run", **longer)
    actual = initial_params(config, tmp_path / "run", **longer, train__init_positions="interpolate")["positions.table"]
    theirs, points = arrays(parent)["positions.table"], np.linspace(0, 31, 47)
    expected = np.stack([np.interp(points, np.arange(32), column) for column in theirs.T], axis=1)
    np.testing.assert_allclose(actual, expected, atol=1e-6)


@pytest.mark.slow("trains two runs of another family")
def test_features_that_were_drawn_are_the_parents(config, tmp_path):
    with_seed = lambda seed: apply_changes(config, {"model.family": "performer", "seed": seed})
    train(with_seed(0), tmp_path / "parent")
    initial_params(with_seed(5), tmp_path / "child", train__init_from=str(tmp_path / "parent"))
    inherited, original = (
        jax.tree.leaves(flash_lm.load(run).constants) for run in (tmp_path / "child", tmp_path / "parent")
    )
    assert inherited and all(np.array_equal(a, b) for a, b in zip(inherited, original, strict=True))


@pytest.mark.slow("trains a run, and another one with its parameters")
def test_windows_are_those_of_the_config(config, tmp_path):
    """Values that differ by layer look like a parent's random arrays, and are not to be taken."""
    windows = lambda run: [x for name, x in flatten_dict(flash_lm.load(run).constants).items() if "window" in name]
    with_window = lambda size: apply_changes(config, {"model.family": "longformer", "model.window.size": size})
    train(with_window(8), tmp_path / "parent")
    child = tmp_path / "child"
    initial_params(with_window(4), child, train__init_from=str(tmp_path / "parent"))
    saved = restore(run_name(child), build_experiment(parse(with_window(4))).abstract)[0].constants
    for values, window in ((windows(tmp_path / "parent"), 8), (windows(child), 4), (windows(f"{child}@0"), 4)):
        assert len(values) == 1 and np.all(values[0] == window)
    assert window in np.concatenate(jax.tree.leaves(saved)) and 8 not in np.concatenate(jax.tree.leaves(saved))


def test_a_checkpoint_replaces_random_arrays_and_no_windows(config):
    """In one model: the features of performer are drawn, the windows of longformer follow from the config."""

    def function(window: int, seed: int) -> ModelFunction:
        keys = {"model.pattern": ("performer", "longformer"), "model.vocab_size": 260, "model.window.size": window}
        return ModelFunction(complete(parse(apply_changes(config, keys)).model), seed)

    own, other = function(4, 0), function(8, 1)
    actual, mine, theirs = (
        flatten_dict(x.constants, sep="/") for x in (own.replace_constants(other.constants), own, other)
    )
    assert any("window" in name for name in actual) and len(actual) > 2
    for name, x in actual.items():
        drawn = np.issubdtype(x.dtype, np.floating)
        assert np.array_equal(x, theirs[name] if drawn else mine[name]), name
        assert np.array_equal(mine[name], theirs[name]) == ("stage" in name)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"model.num_layers": 1, "model.mlp_dim": 8},
            r"of another shape: .*kernel \[2, 16, .*kernel \[2, .* there",
        ),
        ({"data.tokenizer": "sentencepiece"}, "another vocabulary .data.tokenizer=bytes there, sentencepiece here"),
        ({"train.branch_from": "{parent}"}, "train.branch_from the complete state: give one of them"),
        ({"model.family": "performer"}, "is of the family transformer_plus_plus, and this run of performer: choose"),
        ({"train.init_from": "nowhere"}, "nowhere holds no run"),
        ({"train.init_from": "{parent}@5"}, "no checkpoint of step 5"),
        ({"train.freeze": ("head", "shared")}, "train.freeze: head, shared matches no parameter: they are embedding"),
        ({"train.freeze": ("",)}, "freezes every parameter"),
        ({"train.freeze": ("(",)}, "is not a regex"),
    ],
    ids=str,
)
def test_a_refused_parent_writes_nothing(config, parent, tmp_path, keys, message):
    keys = {"train.init_from": str(parent)} | keys
    keys = {key: x.format(parent=parent) if isinstance(x, str) else x for key, x in keys.items()}
    with pytest.raises(InputError, match=message):
        train(apply_changes(config, keys), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_frozen_parameters_are_unchanged_to_the_bit(config, parent, tmp_path):
    """With weight decay, clipping and logs, and without."""
    keys = {"train.init_from": str(parent), "train.freeze": ("embedding", "sublayer_0/(query|key)"), "train.steps": 3}
    train(apply_changes(config, keys | {"train.weight_decay": 0.5, "train.clip": 0.01}), tmp_path / "run")
    before, after = arrays(parent), arrays(tmp_path / "run")
    still = {name for name in before if before[name].tobytes() == after[name].tobytes()}
    assert still == {"embedding", "layers.sublayer_0.query.kernel", "layers.sublayer_0.key.kernel"}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_changes_frozen_parameters(config, name):
    """No -0 becomes a 0, and the other parameters move as if the frozen ones did not exist."""
    settings = apply_changes(config, {"train.optimizer": name, "train.freeze": ("a",), "train.weight_decay": 0.1})
    random = np.random.default_rng(0)
    draw = lambda *shape: random.standard_normal(shape).astype(np.float32)
    params = {"a": draw(4, 4), "b": draw(4, 4)}
    params["a"][0, 0] = -0.0
    grads = {"a": np.zeros((4, 4), np.float32), "b": draw(4, 4)}  # as the step computes them
    like = lambda value: dict.fromkeys(params, value)
    traits = Traits(like(True), like(True), like(1.0), like(False), like(False))
    alone = Traits(
        *({"b": x["b"]} for x in (traits.matrix, traits.hidden, traits.rate, traits.project, traits.positions))
    )
    free = apply_changes(settings, {"train.freeze": ()})
    actual, expected = params, {"b": params["b"]}
    both, one = make_optimizer(parse(settings).train, traits), make_optimizer(parse(free).train, alone)

    @functools.partial(jax.jit, static_argnums=0)
    def update(optimizer, grads, state, params):
        return optimizer.update(grads, state, params, learning_rate=0.01)

    states = both.init(actual), one.init(expected)
    for _ in range(3):
        updates, state = update(both, grads, states[0], actual)
        others, other = update(one, {"b": grads["b"]}, states[1], expected)
        # Not compiled: XLA would take the sum with either zero for the parameter.
        actual, expected, states = (
            optax.apply_updates(actual, updates),
            optax.apply_updates(expected, others),
            (state, other),
        )
    assert np.asarray(actual["a"]).tobytes() == np.asarray(params["a"]).tobytes()
    point = gradient_point(states[0], actual)["a"]  # the average of a and a copy of it
    np.testing.assert_allclose(point, params["a"], rtol=1e-6)
    np.testing.assert_allclose(actual["b"], expected["b"], rtol=1e-6)
    assert not np.array_equal(actual["b"], params["b"])


@pytest.mark.slow("trains a run with each optimizer")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_starts_from_the_parameters_of_the_parent(config, parent, tmp_path, name):
    """A step with a learning rate near zero leaves them unchanged."""
    keys = {"train.init_from": str(parent), "train.optimizer": name, "train.learning_rate": 1e-9, "train.steps": 1}
    train(apply_changes(config, keys | {"train.warmup_steps": 0, "train.weight_decay": 0.0}), tmp_path / "run")
    before, after = arrays(parent), arrays(tmp_path / "run")
    for key, x in after.items():
        np.testing.assert_allclose(x, before[key], atol=1e-6, err_msg=key)


@pytest.mark.slow("trains two runs, and scores one")
def test_a_run_with_a_parent_can_be_branched(config, parent, tmp_path):
    train(apply_changes(config, {"train.init_from": str(parent)}), tmp_path / "begun")
    branch = {"train.branch_from": str(tmp_path / "begun"), "train.steps": 3}
    train(apply_changes(config, branch), tmp_path / "branch")
    assert flash_lm.load(tmp_path / "branch").config.train.init_from is None
    (line,) = evaluate(tmp_path / "branch", "test")
    assert line["step"] == 3 and line["parent_run"] == "begun"


def test_an_export_is_not_a_run(config, parent, tmp_path):
    export(load_model(parent), tmp_path / "export", "mit")
    before = sorted(tmp_path.rglob("*"))
    for keys, workdir, message in (
        ({}, "export", "is an exported model: choose another --workdir, and start from it with"),
        ({"train.branch_from": str(tmp_path / "export")}, "new", "without a training state: use train.init_from"),
    ):
        with pytest.raises(InputError, match=message):
            train(apply_changes(config, keys), tmp_path / workdir)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_length_n_and_its_scale_are_those_of_the_parent(config, parent, tmp_path):
    """They do not follow the new sequence length."""
    model = fill_from_parent(apply_changes(config, {"data.length": 16}), str(parent)).model
    assert (model.divides, model.normalizer) == ("scores", str(parse(config).data.length))


@pytest.mark.slow("trains two runs")
def test_a_larger_vocabulary_is_inherited(config, tmp_path):
    train(apply_changes(config, {"model.vocab_size": 300}), tmp_path / "parent")
    initial = initial_params(config, tmp_path / "child", train__init_from=str(tmp_path / "parent"), task="masked_lm")
    assert len(initial["embedding"]) == 300


def test_a_tokenizer_of_another_kind_is_refused(config, parent, tmp_path):
    """Also if the parent's corpus, one of examples, made its tokenizer, which its config does not name."""
    run = shutil.copytree(parent, tmp_path / "run")
    shutil.rmtree(run / "tokenizer")
    save_tokenizer(CharacterTokenizer("abc"), run / "tokenizer")
    with pytest.raises(InputError, match="data.tokenizer=characters there, bytes here"):
        parent_tokenizer(str(run), config)


def test_needles_are_written_with_the_tokenizer_of_the_parent(config, parent, tmp_path):
    """Whatever the config names, which a new run would not read either; other examples have tokens of their own."""
    run = tmp_path / "run"
    shutil.copytree(parent, run)
    save_tokenizer(CharacterTokenizer("abc"), run / "tokenizer")
    needles = apply_changes(config, {"data.corpus": "needle", "data.pack": "examples", "data.tokenizer": "bytes"})
    assert parent_tokenizer(str(run), needles).kind == "characters"
    assert parent_tokenizer(str(run), apply_changes(needles, {"data.corpus": "copy"})) is None


def test_names_are_matched_like_those_of_mesh_rules():
    tree = {"layers": {"x": {"kernel": 1}}, "embedding": 2}
    assert frozen_mask(("layers/.*/kernel",), tree) == {"layers": {"x": {"kernel": True}}, "embedding": False}
    assert [parameter_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)] == [
        "embedding",
        "layers/x/kernel",
    ]
