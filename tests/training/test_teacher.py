"""`train.teacher`: its two losses against loops over layers and full logits, and runs that have a teacher."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding, PartitionSpec
from small import small_config, write_corpus

from flash_lm.cli.plan_text import plan_text
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.data.tokenizer import ByteTokenizer, CharacterTokenizer
from flash_lm.data.tokenizers import save_tokenizer
from flash_lm.errors import InputError
from flash_lm.families.family import complete
from flash_lm.models.model_inputs import ModelInputs
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import run_name
from flash_lm.training.checkpoint_read import restore
from flash_lm.training.plan import make_plan, parse_target, plan_config
from flash_lm.training.setup import build_experiment
from flash_lm.training.sharding import make_mesh, param_shardings
from flash_lm.training.train_loop import train
from flash_lm.training.train_state import ModelFunction
from flash_lm.training.train_step import make_gradients
from flash_lm.training.vmapped_loop import check_vmapped
from training.runs import stop_after

pytestmark = pytest.mark.usefixtures("usual_promotion")

# Rows of two documents of equal length and padding, so that each document can be computed alone, without any.
VOCAB, ROWS, DOCUMENT, LENGTH, WEIGHT = 11, 4, 6, 16, 3.0
WIDTHS = {"layers": (8, 8), "distribution": (8, 12)}  # of the model and its teacher
FREEZE = {"layers": (r"^(?!layers/sublayer_0)", "sublayer_0/(query|key)"), "distribution": ("sublayer_0/value",)}
MESHES = [None, (2, 2, 1)]


def function(family: str, width: int, seed: int) -> ModelFunction:
    config = get_config()
    config.model.update(family=family, num_layers=2, model_dim=width, num_heads=2, vocab_size=VOCAB, max_length=LENGTH)
    config.model.update(
        linear={"chunk_size": 4}, mlp_dim=8, dropout=0.0, biases="all", init="lecun", scale_init="as_init"
    )
    config.data.tokens_per_batch = ROWS * LENGTH
    parsed = parse(config)
    return ModelFunction(complete(parsed.model), seed)


def drawn(model: ModelFunction, seed: int):
    """Parameters of which none is 0, so that the output of a mixer is not 0 at padding."""
    draw = np.random.default_rng(seed)
    return jax.tree.map(lambda x: x + 0.1 * draw.standard_normal(x.shape, np.float32), jax.jit(model.init)())


def batch() -> dict[str, np.ndarray]:
    draw, index = np.random.default_rng(0), np.arange(LENGTH)
    segments = np.where(index < 2 * DOCUMENT, 1 + index // DOCUMENT, 0) * np.ones((ROWS, 1))
    targets = draw.random((ROWS, LENGTH)) < np.linspace(0.4, 0.9, ROWS)[:, None]  # microbatches differ in their number
    return {
        "inputs_BxL": draw.integers(VOCAB, size=(ROWS, LENGTH), dtype=np.int32),
        "targets_BxL": draw.integers(VOCAB, size=(ROWS, LENGTH), dtype=np.int32),
        "loss_mask_BxL": (targets & (segments > 0)).astype(np.float32),
        "segment_ids_BxL": segments.astype(np.int32),
        "positions_BxL": np.tile(index % DOCUMENT, (ROWS, 1)).astype(np.int32),
    }


def documents(rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Each document of packed rows in a row of its own."""
    return {name: x[:, : 2 * DOCUMENT].reshape(-1, DOCUMENT) for name, x in rows.items()}


def layers_by_hand(model, teacher, teacher_params, params, rows):
    """The mean relative error of the mixers of documents without packing, layer after layer, times the targets."""
    student, its = model.bind(params), teacher.bind(teacher_params)
    inputs = ModelInputs(rows["inputs_BxL"])
    (x, context), (_, own_context), errors = its.embed(inputs), student.embed(inputs), []
    for block, own in zip(its.unstacked_blocks(), student.unstacked_blocks(), strict=True):
        h = block.norm_sublayer_0(x)
        y = block.sublayer_0(h, context)
        errors.append(((own.sublayer_0(h, own_context) - y) ** 2).sum() / (y**2).sum())
        x = x + y
        x = x + block.sublayer_1(block.norm_sublayer_1(x), context)
    return sum(errors) / len(errors) * rows["loss_mask_BxL"].sum(), jnp.zeros(())


def distribution_by_hand(model, teacher, teacher_params, params, rows):
    """Cross entropy and weighted KL of all targets, from the logits of both models."""
    log_p, log_q = (
        jax.nn.log_softmax(f.bind(x)(rows["inputs_BxL"])) for f, x in ((model, params), (teacher, teacher_params))
    )
    nll = -jnp.take_along_axis(log_p, rows["targets_BxL"][..., None], axis=-1)[..., 0]
    divergence = WEIGHT * ((jnp.exp(log_q) * (log_q - log_p)).sum(axis=-1) * rows["loss_mask_BxL"]).sum()
    return (nll * rows["loss_mask_BxL"]).sum() + divergence, divergence


BY_HAND = {"layers": layers_by_hand, "distribution": distribution_by_hand}


class Pair:
    """A model and its teacher, and the step's gradients of one of the losses in two microbatches."""

    def __init__(self, loss: str):
        width, teacher_width = WIDTHS[loss]
        self.loss, self.model = loss, function("linear_transformer", width, 0)
        self.teacher = function("transformer_plus_plus", teacher_width, 1)
        keys = {
            "accumulate": 2,
            "teacher_loss": loss,
            "teacher_weight": WEIGHT,
            "freeze": FREEZE[loss],
            "loss_chunk": 8,
        }
        self.config = dataclasses.replace(parse(get_config()).train, **keys)
        self.params, self.teacher_params = drawn(self.model, 0), drawn(self.teacher, 1)
        gradients = make_gradients(self.model, self.config, 0, teacher=self.teacher)
        self.compute = jax.jit(lambda params, rows, its: gradients(params, jnp.int32(0), rows, None, its)[:2])

    def on_mesh(self, shape, rows):
        """Loss, penalties and gradient on one device or a mesh."""
        if shape is None:
            return self.compute(self.params, rows, self.teacher_params)
        raw = get_config()
        raw.mesh.shape = shape
        mesh_config = parse(raw).mesh
        mesh = make_mesh(mesh_config, jax.devices()[: int(np.prod(shape))])
        of_rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        placed = [
            jax.device_put(params, param_shardings(params, model.traits().matrix, mesh_config, mesh))
            for model, params in ((self.model, self.params), (self.teacher, self.teacher_params))
        ]
        with jax.set_mesh(mesh):
            return self.compute(placed[0], jax.device_put(rows, of_rows), placed[1])

    def by_hand(self, rows):
        """The sums over the microbatches, of which each has every second row, and their gradient without `freeze`."""
        f = jax.jit(jax.value_and_grad(lambda *x: BY_HAND[self.loss](self.model, self.teacher, *x), 1, has_aux=True))
        halves = [documents({name: x[i::2] for name, x in rows.items()}) for i in range(2)]
        parts = [f(self.teacher_params, self.params, half) for half in halves]
        return jax.tree.map(lambda a, b: a + b, *parts)


@pytest.fixture(scope="module", params=BY_HAND)
def pair(request, usual_promotion):
    return Pair(request.param)


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_loss_and_gradient_equal_those_by_hand(pair, shape):
    """Of packed rows with padding, in microbatches, with frozen parameters, on one device and on a mesh."""
    rows = batch()
    (total, penalties), gradient = pair.on_mesh(shape, rows)
    (expected, divergence), wanted = pair.by_hand(rows)
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert list(penalties) == (["divergence"] if pair.loss == "distribution" else [])
    for penalty in penalties.values():
        np.testing.assert_allclose(penalty, divergence, rtol=1e-5)
    # Frozen parameters have no gradient; all others have one, that by hand.
    gradient, wanted = (flatten_dict(x, sep="/") for x in (gradient, wanted))
    mixer = {"query", "key", "value", "output"}
    frozen = {"query", "key"} if pair.loss == "layers" else {"value"}
    trained = {f"layers/sublayer_0/{name}/{kind}" for name in mixer - frozen for kind in ("kernel", "bias")}
    for name, x in gradient.items():
        if name in trained or (pair.loss == "distribution" and "sublayer_0/value" not in name):
            np.testing.assert_allclose(x, wanted[name], atol=1e-5 * np.abs(wanted[name]).max(), err_msg=name)
            assert np.abs(x).max() > 0
        else:
            assert not np.any(x), name
    assert trained <= gradient.keys()


def test_a_microbatch_of_padding_counts_for_nothing(pair):
    rows = batch()
    for name in ("segment_ids_BxL", "loss_mask_BxL", "positions_BxL"):
        rows[name][1::2] = 0
    (total, _), gradient = pair.on_mesh(None, rows)
    kept = {name: np.repeat(x[0::2], 2, axis=0) for name, x in rows.items()}  # each half is the first one
    (twice, _), wanted = pair.on_mesh(None, kept)
    np.testing.assert_allclose(2 * total, twice, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(2 * a, b, rtol=1e-4, atol=1e-6), gradient, wanted)


def test_a_model_is_its_own_teacher(pair):
    """Nothing is left to learn from it: no divergence, and no error of a layer."""
    config = dataclasses.replace(pair.config, freeze=(), accumulate=1)
    itself = make_gradients(pair.teacher, config, 0, teacher=pair.teacher)
    compute = lambda params, rows: itself(params, jnp.int32(0), rows, None, params)[0]
    total, penalties = jax.jit(compute)(pair.teacher_params, batch())
    left = penalties["divergence"] if pair.loss == "distribution" else total
    assert abs(left) < 1e-5 < 1e-2 < abs(pair.on_mesh(None, batch())[0][0])


# Runs.


@pytest.fixture(scope="module")
def config(tmp_path_factory, usual_promotion):
    """The config of the teacher."""
    folder = tmp_path_factory.mktemp("corpus")
    config = small_config(write_corpus(folder / "text"), folder / "cache")
    config.model.update(num_layers=2, model_dim=8, mlp_dim=8)
    config.train.update(steps=4, warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0)
    config.mesh.shape = (2, 4, 1)
    return config


@pytest.fixture(scope="module")
def teachers(config, tmp_path_factory):
    """Two trained teachers of other parameters."""
    folder = tmp_path_factory.mktemp("teachers")
    for seed, name in enumerate(("first", "second")):
        train(apply_changes(config, {"train.steps": 2, "seed": seed}), folder / name)
    return folder


def student(config, teacher, **keys):
    """The config of a run with a teacher."""
    changes = {"model.family": "linear_transformer", "train.teacher": str(teacher), "seed": 7}
    return apply_changes(config, changes | {key.replace("__", "."): x for key, x in keys.items()})


def untrained(config, folder, tokenizer=None):
    """The folder of a model without parameters."""
    folder.mkdir()
    RunFolder(folder).write(config)
    save_tokenizer(tokenizer or ByteTokenizer(), folder / "tokenizer")
    return folder


@pytest.mark.slow("trains runs on a mesh, and resumes them")
@pytest.mark.parametrize("loss", ["layers", "distribution"])
def test_a_run_with_a_teacher_is_resumed_to_the_bit(config, teachers, tmp_path, loss):
    """On a mesh, with weight decay and dropout, and although the teacher's folder moves."""
    asked = lambda teacher: student(config, teacher, train__teacher_loss=loss, train__weight_decay=0.1)
    source = shutil.copytree(teachers / "first", tmp_path / "teacher")
    train(asked(source), tmp_path / "whole")
    train(asked(source), tmp_path / "parts", should_stop=stop_after(2))
    moved = source.rename(tmp_path / "moved")
    files = {path: path.read_bytes() for path in (tmp_path / "parts").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match="has other parameters than the teacher that the run began with"):
        train(asked(teachers / "second"), tmp_path / "parts")
    with pytest.raises(InputError, match="train.teacher_weight=9.0 there, 1.0 here"):
        train(apply_changes(asked(moved), {"train.teacher_weight": 1.0}), tmp_path / "parts")
    assert files == {path: path.read_bytes() for path in (tmp_path / "parts").rglob("*") if path.is_file()}
    train(asked(moved), tmp_path / "parts")

    experiment = build_experiment(parse(asked(moved)))
    (whole, facts), (parts, _), (first, _) = (
        restore(run_name(name), experiment.abstract)
        for name in (tmp_path / "whole", tmp_path / "parts", f"{tmp_path / 'parts'}@2")
    )
    assert all(np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (whole, parts)), strict=True))
    # The record says which teacher it was; its parameters are not part of the checkpoint.
    its = restore(run_name(moved), build_experiment(parse(config)).abstract)
    assert facts["teacher"]["step"] == 2 and facts["teacher"]["run"] == str(source)
    assert facts["teacher"]["corpus"] == its[1]["corpus"] and "teacher" not in its[1]
    # The loss falls; with the loss of layers nothing but their mixers has moved.
    losses = [line["loss"] for line in read_jsonl(tmp_path / "whole" / "metrics.jsonl") if line["split"] == "train"]
    assert losses[-1] < losses[0]
    moves = jax.tree_util.tree_map_with_path(lambda path, a, b: not np.array_equal(a, b), whole.params, first.params)
    changed = {name for name, x in flatten_dict(moves, sep="/").items() if x}
    if loss == "layers":
        assert changed == {f"layers/sublayer_0/{name}/kernel" for name in ("query", "key", "value", "output")}
    else:
        assert "embedding" in changed


@pytest.mark.parametrize(
    ("keys", "teacher", "message"),
    [
        ({}, {"model.vocab_size": 300}, "has 300 words, and this model has 260: they need the same vocabulary"),
        ({}, {"model.num_layers": 1}, "needs model.num_layers=1, as the teacher has, and it is 2"),
        ({}, {"model.model_dim": 16}, "needs model.model_dim=16, as the teacher has, and it is 8"),
        ({}, {"model.pattern": ("flash", "transformer_plus_plus")}, "needs models without model.pattern"),
        ({"model.pattern": ("flash", "transformer_plus_plus")}, {}, "needs models without model.pattern"),
        ({}, {"model.family": "mega"}, "the layers of train.teacher=.*, mega, replace it"),
        ({"model.family": "adaptive_span"}, {}, "layers of adaptive_span have a penalty"),
        ({}, {"task": "masked_lm"}, "must be a causal model of text with the softmax head, and it is not"),
        (
            {},
            {
                "model.absolute_positions": "learned",
                "model.max_length": 31,
                "data.length": 31,
                "data.tokens_per_batch": 248,
            },
            "reads 31 tokens, and data.length=32 is more",
        ),
    ],
    ids=str,
)
def test_a_teacher_that_does_not_fit_is_refused(config, tmp_path, keys, teacher, message):
    source = untrained(apply_changes(config, teacher), tmp_path / "teacher")
    asked = apply_changes(student(config, source, train__teacher_loss="layers"), keys)
    with pytest.raises(InputError, match=message) as error:
        train(asked, tmp_path / "run")
    assert "\n" not in str(error.value) and not (tmp_path / "run").exists()


def test_a_teacher_that_is_missing_or_reads_other_words_is_refused(config, tmp_path):
    other = CharacterTokenizer("".join(map(chr, range(300, 555))))
    source = untrained(apply_changes(config, {"model.vocab_size": 260}), tmp_path / "teacher", other)
    for teacher, message in ((source, "has another vocabulary than the run"), ("nowhere", "nowhere holds no run")):
        with pytest.raises(InputError, match=message):
            train(student(config, teacher), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_having_a_teacher_or_none(config, teachers, tmp_path):
    with_teacher = student(config, teachers / "first")
    untrained(with_teacher, tmp_path / "taught")
    untrained(apply_changes(with_teacher, {"train.teacher": None}), tmp_path / "alone")
    with pytest.raises(InputError, match=r"train\.teacher=open there, .*first here"):
        train(with_teacher, tmp_path / "alone")
    with pytest.raises(InputError, match=r"train\.teacher=.*first there,  here"):
        train(apply_changes(with_teacher, {"train.teacher": ""}), tmp_path / "taught")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"train.carry_state": True}, "train.carry_state"),
        ({"train.z_loss": 1e-4}, "train.z_loss"),
        ({"train.label_smoothing": 0.1}, "train.label_smoothing"),
        ({"task": "seq2seq", "model.encoder.family": "transformer_plus_plus"}, "model.encoder.family"),
        ({"task": "classify"}, "task, model.head"),
        ({"task": "masked_lm"}, "task"),
        ({"model.head": "logistics"}, "model.head"),
    ],
    ids=str,
)
def test_what_goes_without_a_teacher_only(config, keys, named):
    with pytest.raises(InputError) as error:
        parse(student(config, "teacher", **{key.replace(".", "__"): x for key, x in keys.items()}))
    assert len([x for x in str(error.value).split("\n") if f"no other term: leave {named} at" in x]) == 1


def test_what_runs_with_a_teacher_are_not_trained_with(config, tmp_path):
    asked = student(config, untrained(config, tmp_path / "teacher"))
    with pytest.raises(InputError, match="--vmap trains runs without a teacher"):
        check_vmapped(parse(asked))
    with pytest.raises(InputError, match="--debug_nonfinite does not support train.teacher"):
        train(asked, tmp_path / "run", debug_nonfinite=True)
    assert not (tmp_path / "run").exists()


# Plans.


@pytest.mark.parametrize("loss", BY_HAND)
def test_a_plan_counts_the_teacher_and_reads_no_parameters(config, tmp_path, loss):
    source = untrained(config, tmp_path / "teacher")
    asked = student(config, source, train__teacher_loss=loss, mesh__shape=(1, 1, 1))
    made, alone = (
        make_plan(
            plan_config(apply_changes(asked, {"train.teacher": teacher}), tmp_path / "run", 1), parse_target("L4")
        )
        for teacher in (str(source), None)
    )
    # Per token, by hand: D = 8, two layers of four maps and pairs of visible tokens, a GLU of width 8, 260 words.
    pairs = 16.5
    attention, feed_forward, head = 2 * 4 * 64 + 4 * 8 * pairs, 2 * 3 * 64, 2 * 8 * 260
    a_layer = attention + feed_forward
    of_teacher = 2 * a_layer + (head if loss == "distribution" else 0)
    mixers = alone.step_flops / 256 - 3 * (head + 2 * 2 * 2 * 64)  # the model has an MLP of two maps
    of_model = alone.step_flops / 256 if loss == "distribution" else mixers
    assert made.step_flops / 256 == pytest.approx(of_teacher + of_model)
    # Float32 parameters of the teacher: its maps, the gains and offsets of its norms, and the table of words.
    parameters = 2 * (4 * 64 + 3 * 64) + 5 * 2 * 8 + 260 * 8
    assert made.memory.state - alone.memory.state == 4 * parameters
    text, of_what = plan_text(made), {"layers": "the teacher's layers", "distribution": "of the teacher"}
    assert ", and the teacher's parameters" in text and f"{of_what[loss]}, forward)" in text
    assert not (tmp_path / "run").exists()


def test_a_plan_downloads_no_teacher(config, tmp_path):
    with pytest.raises(InputError, match=r"train\.teacher=hub:owner/name would be downloaded"):
        plan_config(student(config, "hub:owner/name"), tmp_path / "run", 1)
