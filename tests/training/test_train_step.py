"""The training step, on eight fake devices: loss, accumulation, clipping, schedule, decay."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from flash_lm.config.experiment import parse
from flash_lm.configs.base import get_config
from flash_lm.families.family import complete
from flash_lm.training.evaluation import make_evaluation_step
from flash_lm.training.optimizer import make_optimizer
from flash_lm.training.schedule import learning_rate
from flash_lm.training.setup import build_setup
from flash_lm.training.sharding import make_mesh
from flash_lm.training.train_state import ModelFunction, TrainState, init_state
from flash_lm.training.train_step import make_gradients, make_scheduled_step, make_train_step

pytestmark = pytest.mark.usefixtures("usual_promotion")

VOCAB, B, L = 50, 8, 16


@functools.cache
def parts(**model_keys):
    config = get_config()
    config.model.update(
        family="transformer",
        num_layers=1,
        model_dim=16,
        num_heads=2,
        gau={"shared_dim": 8},
        chunks={"size": 8},
        linear={"chunk_size": 8},
        max_length=L,
        vocab_size=VOCAB,
        init="lecun",
        scale_init="as_init",  # gated units mix visibly from the start
    )
    config.model.update_from_flattened_dict(model_keys)
    config.data.tokens_per_batch = B * L
    parsed = parse(config)
    return ModelFunction(complete(parsed.model), seed=0), parsed.train


def batch():
    draw = np.random.default_rng(0)
    mask = (draw.random((B, L)) < 0.8).astype(np.float32)
    return {
        "inputs_BxL": draw.integers(VOCAB, size=(B, L), dtype=np.int32),
        "targets_BxL": draw.integers(VOCAB, size=(B, L), dtype=np.int32),
        "loss_mask_BxL": mask,
        "segment_ids_BxL": np.ones((B, L), np.int32),
        "positions_BxL": np.tile(np.arange(L, dtype=np.int32), (B, 1)),
    }


@functools.cache
def first_parameters(**model_keys):
    return jax.jit(parts(**model_keys)[0].init)()


@functools.cache
def start(train_keys=(), **model_keys):
    """The state before the first step, and the compiled step."""
    model, config = parts(**model_keys)
    config = dataclasses.replace(config, **dict(train_keys))
    optimizer = make_optimizer(config, model.traits())
    params = first_parameters(**model_keys)
    state = TrainState(jnp.zeros((), jnp.int32), params, jax.jit(optimizer.init)(params))
    return state, jax.jit(make_scheduled_step(model, optimizer, config, seed=0))


@functools.cache
def one_step(train_keys=(), steps=1, **model_keys):
    state, step = start(train_keys, **model_keys)
    for _ in range(steps):
        state, metrics = step(state, batch())
    return state, metrics


@pytest.mark.parametrize(("pack", "passes"), [("stream", 1), ("documents", 3)])
def test_bidirectional_rows_of_one_document_take_one_pass(pack, passes):
    """Packed rows are read from both ends, which shows as a reversal in the program."""
    raw = get_config()
    raw.task, raw.data.pack = "masked_lm", pack
    raw.model.update(
        vocab_size=VOCAB,
        max_length=L,
        model_dim=8,
        gau={"shared_dim": 4},
        chunks={"size": 4},
        linear={"chunk_size": 4},
        num_layers=1,
    )
    raw.data.tokens_per_batch = B * L
    raw.train.update(steps=2, warmup_steps=0)
    config = parse(raw)
    config = dataclasses.replace(config, model=complete(config.model))
    setup = build_setup(config, make_mesh(config.mesh, jax.devices()[:1]))
    step = make_scheduled_step(setup.model, setup.optimizer, config.train, seed=0)
    program = str(jax.make_jaxpr(step)(jax.eval_shape(lambda: init_state(setup.model, setup.optimizer)), batch()))
    assert ("rev[" in program) == (passes == 3)


def test_the_loss_is_the_mean_over_targets():
    model, _ = parts()
    state, metrics = one_step()
    data = batch()
    logits = jax.jit(lambda params: model.bind(params)(data["inputs_BxL"]))(first_parameters())
    logits = np.asarray(logits, np.float64)
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    nll = -np.take_along_axis(log_p, data["targets_BxL"][..., None], -1)[..., 0]
    assert np.allclose(metrics["loss"], (nll * data["loss_mask_BxL"]).sum() / data["loss_mask_BxL"].sum(), rtol=1e-5)
    assert metrics["tokens"] == data["loss_mask_BxL"].sum()
    assert state.step == 1


@pytest.mark.parametrize(
    "count", [pytest.param(2, marks=pytest.mark.slow("compiles a step; another number of microbatches")), 8]
)
def test_accumulated_microbatches_equal_one_large_batch(count):
    (one, metrics_one), (many, metrics_many) = (
        jax.device_get(one_step((("accumulate", n), ("eps", 1e-3)))) for n in (1, count)
    )
    for name in ("loss", "grad_norm"):
        assert np.allclose(metrics_one[name], metrics_many[name], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(one.params), jax.tree.leaves(many.params), strict=True):
        assert np.abs(a - b).max() <= 1e-5 * max(1.0, np.abs(a).max())


@pytest.mark.parametrize("chunk", [8, 40])
def test_slices_of_the_loss_change_nothing(chunk):
    losses = [one_step(keys, steps=2)[1]["loss"] for keys in ((("loss_chunk", chunk),), ())]  # the last in one slice
    assert np.allclose(*losses, rtol=1e-6)


def test_clipping_bounds_the_update():
    # With one step of plain Adam the update hides the gradient's size, so look at the first moment.
    def first_moment(clip):
        state, metrics = one_step((("clip", clip),))
        moments = optax.tree_utils.tree_get(state.opt_state, "mu")
        return float(jax.jit(optax.tree.norm)(moments)) / (1 - 0.9), float(metrics["grad_norm"])

    free, norm = first_moment(0.0)
    assert np.allclose(free, norm, rtol=1e-4)
    assert np.allclose(first_moment(norm / 4)[0], norm / 4, rtol=1e-4)


def test_only_matrices_have_weight_decay():
    with_decay, without = (jax.device_get(one_step((("weight_decay", w),))[0].params) for w in (0.5, 0.0))
    initial = jax.device_get(first_parameters())
    rate = float(learning_rate(parts()[1])(0))
    differing = set()
    for (path, a), b, p in zip(
        jax.tree_util.tree_leaves_with_path(with_decay), jax.tree.leaves(without), jax.tree.leaves(initial), strict=True
    ):
        if not np.allclose(a, b, atol=1e-9):
            differing.add(path[-1].key)
            assert np.allclose(b - a, 0.5 * rate * p, atol=1e-7)
    assert differing == {"kernel", "embedding", "table"}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("linear", [0.25, 0.5, 0.75, 1.0, 1.0, 0.85, 0.7]),
        ("constant", [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        ("cosine", [0.25, 0.5, 0.75, 1.0, 1.0, 0.1 + 0.9 * (1 + np.cos(np.pi / 6)) / 2, 0.1 + 0.9 * 0.75]),
    ],
)
def test_schedules(schedule, expected):
    _, config = parts()
    config = dataclasses.replace(
        config, steps=10, warmup_steps=4, schedule=schedule, learning_rate=1.0, end_learning_rate=0.1
    )
    rate = learning_rate(config)
    assert np.allclose([rate(i) for i in range(7)], expected)
    assert np.allclose(rate(10), 1.0 if schedule == "constant" else 0.1)


def test_runs_of_other_rates_and_budgets_have_the_same_program():
    """A search of rates, or a study of budgets, compiles one step."""

    def program(**train_keys):
        model, config = parts()
        config = dataclasses.replace(config, **train_keys)
        optimizer = make_optimizer(config, model.traits())
        state = jax.eval_shape(lambda: init_state(model, optimizer))
        return jax.jit(make_train_step(model, optimizer, config, seed=0)).lower(state, batch(), 0.1).as_text()

    assert program() == program(learning_rate=0.3, steps=77, warmup_steps=5, schedule="cosine", decay_steps=9)
    assert program() != program(weight_decay=0.3)


def test_frozen_parameters_need_no_backward_pass():
    model, config = parts()
    params = first_parameters()

    def gradient(freeze=()):
        gradients = make_gradients(model, dataclasses.replace(config, freeze=freeze), seed=0)
        compiled = jax.jit(gradients).lower(params, jnp.int32(0), batch()).compile()
        return compiled.cost_analysis()["flops"], compiled(params, jnp.int32(0), batch())[1]

    flops, full = gradient()
    fewer, norm_alone = gradient(("^(?!norm)",))
    assert fewer < 0.5 * flops
    np.testing.assert_allclose(norm_alone.pop("norm")["scale"], full["norm"]["scale"], rtol=1e-5)
    assert not any(x.any() for x in jax.tree.leaves(norm_alone))


def test_bfloat16_computes_in_bfloat16_and_keeps_float32_parameters():
    state, metrics = one_step(dtype="bfloat16")
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    assert np.allclose(metrics["loss"], one_step()[1]["loss"], rtol=2e-2)
    assert metrics["loss"] != one_step()[1]["loss"]


def test_dropout_follows_seed_and_step():
    state, step = start.__wrapped__(dropout=0.3)  # not from the cache
    again = step(state, batch())[1]
    metrics = one_step(dropout=0.3)[1], again, one_step(steps=2, dropout=0.3)[1]
    losses = [float(x["loss"]) for x in metrics]
    assert losses[0] == losses[1] != losses[2]
    assert losses[0] != float(one_step()[1]["loss"])


@pytest.mark.parametrize(
    "accumulate", [pytest.param(1, marks=pytest.mark.slow("compiles two steps; without microbatches")), 2]
)
@pytest.mark.parametrize("name", ["z_loss", "label_smoothing"])
def test_a_penalty_is_logged_separately(accumulate, name):
    plain, penalized = (one_step((("accumulate", accumulate), *penalty))[1] for penalty in ((), ((name, 0.5),)))
    assert name not in plain and abs(penalized[name]) > 0.01
    assert np.allclose(penalized["loss"], plain["loss"], rtol=1e-5)
    assert abs(np.log(penalized["grad_norm"] / plain["grad_norm"])) > 0.1


@pytest.mark.slow("compiles three training steps of another family")
def test_redrawn_features_follow_seed_and_step():
    """Without dropout: same parameters, same rows, other features at each step; recomputed, they are the same again."""
    keys = {"family": "performer", "favor.redraw": True}
    still = (("learning_rate", 1e-30),)
    first, second = (float(one_step(still, steps=n, **keys)[1]["loss"]) for n in (1, 2))
    fixed = [float(one_step(still, steps=n, family="performer")[1]["loss"]) for n in (1, 2)]
    assert fixed[0] == pytest.approx(fixed[1], rel=1e-6)
    assert len({round(x, 5) for x in (first, second, fixed[0])}) == 3
    recomputed = one_step(still, remat="full", **keys)[1]
    assert float(recomputed["loss"]) == pytest.approx(first, rel=1e-6)
    assert float(recomputed["grad_norm"]) == pytest.approx(float(one_step(still, **keys)[1]["grad_norm"]), rel=1e-4)


def test_evaluation_sums_do_not_depend_on_the_batch():
    model, config = parts()
    step = jax.jit(make_evaluation_step(model, config.loss_chunk))
    params, data = first_parameters(), batch()
    sizes = np.arange(VOCAB, dtype=np.int32)
    full = step(params, data, sizes)
    halves = [step(params, {k: v[i : i + 4] for k, v in data.items()}, sizes) for i in (0, 4)]
    for name, value in full.items():
        assert np.allclose(value, sum(half[name] for half in halves), rtol=1e-6)
    assert full["bytes"] == (data["targets_BxL"] * data["loss_mask_BxL"]).sum()


SPANS = {"family": "adaptive_span", "span.limit": 8, "span.ramp": 2, "span.init": 4.0, "scan_layers": False}


@pytest.mark.parametrize(("penalty", "end"), [(1e3, 0.0), (0.0, None)], ids=["dear", "free"])
def test_spans_stay_in_bounds_and_are_penalized(penalty, end):
    """A step that is far too large leaves them at the bound, from where a gradient can move them again."""
    state, metrics = one_step((("learning_rate", 10.0), ("warmup_steps", 1)), **SPANS | {"span.penalty": penalty})
    shares = np.concatenate(
        [np.ravel(x) for path, x in jax.tree.leaves_with_path(state.params) if "share" in str(path)]
    )
    assert ((shares >= 0) & (shares <= 1)).all()
    assert end is None or (shares == end).all()
    assert metrics["penalty"] == pytest.approx(penalty * 4.0)
    assert (metrics["span_mean"], metrics["span_max"]) == (4.0, 4.0)  # before the step


def test_spans_are_not_decayed():
    """They are no matrices: without a gradient they do not change."""
    traits = parts(**SPANS)[0].traits()
    marks = [x for path, x in jax.tree.leaves_with_path(traits.matrix) if "share" in str(path)]
    assert marks
    assert not any(marks)


def test_a_skipped_step_does_not_change_the_average():
    model, config = parts()
    config = dataclasses.replace(config, ema=0.5, on_nonfinite="skip")
    optimizer = make_optimizer(config, model.traits())
    state = jax.jit(lambda: init_state(model, optimizer, ema=True))()
    step = jax.jit(make_scheduled_step(model, optimizer, config, seed=0))
    state, _ = step(state, batch())
    before = jax.device_get(state.ema)
    broken = batch() | {"loss_mask_BxL": np.full((B, L), np.nan, np.float32)}
    state, metrics = step(state, broken)
    assert not metrics["finite"]
    assert all(map(np.array_equal, jax.tree.leaves(before), jax.tree.leaves(state.ema)))
    state, metrics = step(state, batch())
    assert metrics["finite"] and not np.array_equal(jax.tree.leaves(before)[0], jax.tree.leaves(state.ema)[0])
