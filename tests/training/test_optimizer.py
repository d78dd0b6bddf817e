"""Optimizers, schedules and clipping against the update rules of their papers in float64 NumPy, layer by layer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from flax import nnx

from flash_lm.config.experiment import parse
from flash_lm.config.train import TrainConfig
from flash_lm.configs.base import get_config
from flash_lm.families.family import complete
from flash_lm.layers.parameter import VECTORS, Traits, parameter_name, traits
from flash_lm.training.muon import scale_by_muon
from flash_lm.training.optimizer import OPTIMIZERS, make_optimizer
from flash_lm.training.schedule import learning_rate
from flash_lm.training.schedule_free import gradient_point
from flash_lm.training.train_state import ModelFunction

pytestmark = pytest.mark.usefixtures("usual_promotion")

LAYERS, STEPS = 3, 8


def settings(**keys) -> TrainConfig:
    defaults = {"learning_rate": 0.05, "warmup_steps": 0, "schedule": "constant", "clip": 0.0, "weight_decay": 0.1}
    return dataclasses.replace(parse(get_config()).train, **defaults | {"b1": 0.8, "b2": 0.95, "eps": 1e-6} | keys)


@functools.cache
def parameters() -> dict:
    draw = np.random.default_rng(0)
    sizes = {"embedding": (140, 130), "layers/kernel": (LAYERS, 130, 140), "layers/scale": (LAYERS, 5)}
    arrays = {name: draw.normal(size=size) * 10.0 ** draw.integers(-2, 2) for name, size in sizes.items()}
    # Layers of very different sizes show an update that is computed over all of them.
    for name in ("layers/kernel", "layers/scale"):
        arrays[name] *= np.array([0.1, 1.0, 30.0]).reshape(-1, *[1] * (arrays[name].ndim - 1))
    return arrays


@functools.cache
def gradients(step: int) -> dict:
    draw = np.random.default_rng(step + 1)
    scale = np.array([1e-3, 1.0, 20.0])
    grads = {name: draw.normal(size=x.shape) for name, x in parameters().items()}
    for name in ("layers/kernel", "layers/scale"):
        grads[name] *= scale.reshape(-1, *[1] * (grads[name].ndim - 1))
    return grads


def unflatten(flat: dict) -> dict:
    layers = {name.split("/")[1]: x for name, x in flat.items() if "/" in name}
    return {"embedding": flat["embedding"], "layers": layers}


def split_layers(flat: dict) -> dict:
    """Each layer's slice as a separate parameter."""
    stacked = {(name, i): x[i] for name, x in flat.items() if "/" in name for i in range(LAYERS)}
    return {(name, None): x for name, x in flat.items() if "/" not in name} | stacked


RATES = {"embedding": 1.0, "layers/kernel": 1.0, "layers/scale": 1.0}


def traits_with(rates: dict) -> Traits:
    """Traits that make everything a matrix except the scales."""
    matrix, no = {name: "scale" not in name for name in rates}, dict.fromkeys(rates, False)
    hidden = {name: "kernel" in name for name in rates}
    return Traits(unflatten(matrix), unflatten(hidden), unflatten(rates), unflatten(no), unflatten(no))


def run_ours(config: TrainConfig, rates: dict = RATES) -> dict:
    optimizer = make_optimizer(config, traits_with(rates))
    params, rate = jax.tree.map(np.float32, unflatten(parameters())), learning_rate(config)
    state = jax.jit(optimizer.init)(params)

    @jax.jit
    def update(grads, state, params, step):
        updates, state = optimizer.update(grads, state, params, learning_rate=rate(step))
        return optax.apply_updates(params, updates), state

    for step in range(STEPS):
        params, state = update(jax.tree.map(np.float32, unflatten(gradients(step))), state, params, step)
    params = jax.device_get(params)
    return split_layers({"embedding": params["embedding"]} | {f"layers/{k}": x for k, x in params["layers"].items()})


# Update rules of one parameter: (gradient, its memory, step from 1, config, parameter) -> direction.


def adamw(g, memory, t, c, p):
    m = memory["m"] = c.b1 * memory.get("m", 0) + (1 - c.b1) * g
    v = memory["v"] = c.b2 * memory.get("v", 0) + (1 - c.b2) * g**2
    return m / (1 - c.b1**t) / (np.sqrt(v / (1 - c.b2**t)) + c.eps)


def radam(g, memory, t, c, p):
    """Liu et al. 2020, algorithm 2; the rectified step from ρ_t ≥ 5 on, as in the code of the paper."""
    m = memory["m"] = c.b1 * memory.get("m", 0) + (1 - c.b1) * g
    v = memory["v"] = c.b2 * memory.get("v", 0) + (1 - c.b2) * g**2
    longest = 2 / (1 - c.b2) - 1
    rho = longest - 2 * t * c.b2**t / (1 - c.b2**t)
    m_hat = m / (1 - c.b1**t)
    if rho < 5:
        return m_hat
    r = np.sqrt((rho - 4) * (rho - 2) * longest / ((longest - 4) * (longest - 2) * rho))
    return r * m_hat / (np.sqrt(v / (1 - c.b2**t)) + c.eps)


def lion(g, memory, t, c, p):
    """Chen et al. 2023, algorithm 2."""
    m = memory.get("m", np.zeros_like(g))
    memory["m"] = c.b2 * m + (1 - c.b2) * g
    return np.sign(c.b1 * m + (1 - c.b1) * g)


def adafactor(g, memory, t, c, p):
    """Shazeer and Stern 2018, algorithms 4 and 5, without momentum; vectors and small matrices are not factored."""
    beta = 1 - t**-0.8
    square = g**2 + 1e-30
    if g.ndim == 2 and min(g.shape) >= 128:
        rows = memory["r"] = beta * memory.get("r", 0) + (1 - beta) * square.mean(1)
        columns = memory["c"] = beta * memory.get("c", 0) + (1 - beta) * square.mean(0)
        v = np.outer(rows, columns) / rows.mean()
    else:
        v = memory["v"] = beta * memory.get("v", 0) + (1 - beta) * square
    u = g / np.sqrt(v)
    u /= max(1, np.sqrt((u**2).mean()))
    return max(1e-3, np.sqrt((p**2).mean())) * u


def muon(g, memory, t, c, p):
    """Jordan et al. 2024, with Nesterov momentum; the size of an update is that of Liu et al. 2025."""
    m = memory["m"] = 0.95 * memory.get("m", 0) + 0.05 * g
    x = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
    tall = x.shape[0] > x.shape[1]
    x = (x.T if tall else x) / np.sqrt((x**2).sum())
    for _ in range(5):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return 0.2 * np.sqrt(max(g.shape)) * (x.T if tall else x)


def rms(g, memory, t, c, p):
    v = memory["v"] = c.b2 * memory.get("v", 0) + (1 - c.b2) * g**2
    return g / (np.sqrt(v / (1 - c.b2**t)) + c.eps)


RULES = {
    "muon": adamw,
    "schedule_free_adamw": rms,
    "adamw": adamw,
    "radam": radam,
    "lion": lion,
    "adafactor": adafactor,
    "lamb": adamw,
}


def run_oracle(config: TrainConfig, rates: dict = RATES) -> dict:
    params = split_layers(parameters())
    memories, moved = {name: {} for name in params}, dict(params)
    for step in range(STEPS):
        grads = split_layers(gradients(step))
        if config.clip:
            norms = {name: np.sqrt((g**2).sum()) for name, g in grads.items()}
            global_norm = np.sqrt(sum(n**2 for n in norms.values()))
            for name in grads:
                norm = global_norm if config.clip_mode == "global" else norms[name]
                grads[name] = grads[name] * min(1, config.clip / norm)
        for name, p in params.items():
            rule = muon if config.optimizer == "muon" and name[0] == "layers/kernel" else RULES[config.optimizer]
            if averages := config.optimizer == "schedule_free_adamw":
                p = (1 - config.b1) * moved[name] + config.b1 * p
            direction = rule(grads[name], memories[name], step + 1, config, p)
            if not name[0].endswith("scale"):
                direction = direction + config.weight_decay * p
            if config.optimizer == "lamb":  # You et al. 2020, algorithm 2, φ the identity
                direction *= np.sqrt((p**2).sum()) / np.sqrt((direction**2).sum())
            step_size = config.learning_rate * rates[name[0]]
            if averages:  # Defazio et al. 2024, equations 8 to 10, with equal weights
                moved[name] = moved[name] - step_size * direction
                params[name] = params[name] + (moved[name] - params[name]) / (step + 1)
            else:
                params[name] = p - step_size * direction
    return params


def assert_matches_the_oracle(config: TrainConfig, rates: dict = RATES) -> None:
    """To 1e-4 of each parameter's displacement, plus the rounding error of the parameter."""
    expected, start = run_oracle(config, rates), split_layers(parameters())
    for key, x in run_ours(config, rates).items():
        moved, size = np.abs(expected[key] - start[key]).max(), np.abs(start[key]).max()
        assert moved > 0
        assert np.abs(np.asarray(x, np.float64) - expected[key]).max() < 1e-4 * moved + 1e-6 * size, key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_update_rule(name):
    assert_matches_the_oracle(settings(optimizer=name))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_may_have_its_own_rate(name):
    assert_matches_the_oracle(settings(optimizer=name), RATES | {"layers/kernel": 3.0, "layers/scale": 0.5})


class Two(nnx.Module):
    """Parameters whose names do not tell their traits."""

    def __init__(self, rngs: nnx.Rngs):
        draw = lambda *shape: jax.random.normal(rngs.params(), shape)
        self.a, self.b = nnx.Param(draw(3, 2)), nnx.Param(draw(3))
        self.c, self.d = nnx.Param(draw(3, 2), **VECTORS), nnx.Param(draw(3, 2), rate=2.0)


def test_traits_do_not_depend_on_names():
    """A matrix has two dimensions besides the layer dimension, unless its trait says otherwise."""
    alone = traits(nnx.state(Two(nnx.Rngs(0)), nnx.Param))
    assert alone.matrix == {"a": True, "b": False, "c": False, "d": True}
    assert alone.rate == {"a": 1.0, "b": 1.0, "c": 1.0, "d": 2.0}

    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def stack(rngs: nnx.Rngs) -> Two:
        return Two(rngs)

    class Model(nnx.Module):
        def __init__(self):
            self.layers = stack(nnx.Rngs(0))

    stacked = traits(nnx.state(Model(), nnx.Param))
    assert stacked.matrix == {"layers": alone.matrix} and stacked.rate == {"layers": alone.rate}


@pytest.mark.parametrize("family", ["aft_full", "aft_local"])
def test_the_first_gradients_of_afts_position_bias_move_it(family):
    """They are about 1e-7. With an eps of 1e-6 a step was a sixth of the learning rate, and the bias did not move."""
    config = get_config()
    config.model.update(family=family, vocab_size=32, max_length=8, model_dim=8, num_layers=2)
    settings = dataclasses.replace(parse(config).train, warmup_steps=0, schedule="constant", clip=0.0)
    model = ModelFunction(complete(parse(config).model), seed=0)
    optimizer = make_optimizer(settings, model.traits())

    @jax.jit
    def first_updates():
        params = model.init()
        gradients = jax.tree.map(lambda x: jnp.full_like(x, 1e-7), params)
        return optimizer.update(gradients, optimizer.init(params), params, learning_rate=settings.learning_rate)[0]

    updates = first_updates()
    core = updates["layers"]["sublayer_0"]["core"]
    for name in ("query_position", "key_position"):
        assert np.abs(core[name]).min() > 0.9 * config.model.aft.bias_rate * settings.learning_rate


@pytest.mark.parametrize("mode", ["global", "parameter"])
@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_clipping(name, mode):
    config = settings(optimizer=name, clip=0.5, clip_mode=mode, eps=1e-3)
    assert_matches_the_oracle(config)
    clipped, free = run_oracle(config), run_oracle(dataclasses.replace(config, clip=0.0))
    assert any(np.abs(free[key] - x).max() > 1e-2 * np.abs(x).max() for key, x in clipped.items())


def test_adafactor_keeps_only_rows_and_columns():
    params = jax.tree.map(jnp.asarray, unflatten(parameters()))
    state = make_optimizer(settings(optimizer="adafactor"), traits_with(RATES)).init(params)
    kept = sum(x.size for x in jax.tree.leaves(state))
    assert kept < 0.03 * sum(x.size for x in jax.tree.leaves(params))


def test_a_stacked_matrix_is_its_layers():
    """The Muon update of stacked layers equals, to the bit, that of an optimizer of fewer layers.

    A single layer has no loop over layers, and is compiled differently.
    """
    draw = np.random.default_rng(0)
    params, gradients = (jnp.float32(draw.normal(size=(6, 20, 30))) for _ in range(2))
    traits = Traits(*({"layers": {"kernel": x}} for x in (True, True, 1.0, False, False)))
    optimizer = make_optimizer(settings(optimizer="muon"), traits)
    update = jax.jit(functools.partial(optimizer.update, learning_rate=0.1))

    def update_layers(layers):
        tree = {"layers": {"kernel": params[layers]}}
        return update({"layers": {"kernel": gradients[layers]}}, optimizer.init(tree), tree)[0]["layers"]["kernel"]

    full = update_layers(slice(None))
    for layers in (slice(2), slice(2, 4), slice(1, 4), slice(5)):
        assert np.array_equal(full[layers], update_layers(layers))
    for i in range(len(params)):
        assert np.allclose(full[i], update_layers(slice(i, i + 1))[0], rtol=0, atol=3e-6 * np.abs(full[i]).max())


def test_muon_equals_optax():
    draw = np.random.default_rng(0)
    params = {"a": np.float32(draw.normal(size=(20, 30))), "b": np.float32(draw.normal(size=(30, 10)))}
    ours, theirs = (
        scale_by_muon(),
        optax.contrib.scale_by_muon(
            weight_dimension_numbers=dict.fromkeys(params, optax.contrib.MuonDimensionNumbers())
        ),
    )
    state, their_state = ours.init(params), theirs.init(params)
    update, their_update = jax.jit(ours.update), jax.jit(theirs.update)
    for _ in range(3):
        gradients = jax.tree.map(lambda x: np.float32(draw.normal(size=x.shape)), params)
        updates, state = update(gradients, state)
        expected, their_state = their_update(gradients, their_state)
        for name, x in updates.items():
            assert np.allclose(x, np.asarray(expected[name]) * 0.2 * max(x.shape) ** 0.5, atol=1e-5)


def test_an_orthogonal_gradient_keeps_its_direction():
    """All singular values are then alike, whatever the polynomial makes of them."""
    config = settings(optimizer="muon", weight_decay=0.0)
    q, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(16, 16)))
    tree = lambda x: {"layers": {"kernel": jnp.float32(x)[None]}}
    traits = Traits(*({"layers": {"kernel": x}} for x in (True, True, 1.0, False, False)))
    optimizer = make_optimizer(config, traits)
    update, _ = optimizer.update(tree(7 * q), optimizer.init(tree(q)), tree(q), learning_rate=config.learning_rate)
    update = np.asarray(update["layers"]["kernel"][0], np.float64)
    size = -np.trace(update @ q.T) / 16
    assert np.allclose(update, -size * q, atol=1e-6) and 0.5 < size / (config.learning_rate * 0.2 * 4) < 1.5


def test_hidden_matrices_map_features_to_features():
    for family in ("flash", "transformer", "aft_full"):
        config = get_config()
        config.model.update(family=family, vocab_size=32, max_length=8, model_dim=8, num_layers=2)
        model = ModelFunction(complete(parse(config).model), seed=0)
        names = {
            parameter_name(path) for path, yes in jax.tree_util.tree_leaves_with_path(model.traits().hidden) if yes
        }
        assert names and all(name.startswith("layers/") and name.endswith("kernel") for name in names)


def test_schedule_free_equals_optax():
    """In optax the parameters are the points of the gradients, and the average is computed for evaluation."""
    config = settings(optimizer="schedule_free_adamw", b1=0.9)
    theirs = optax.contrib.schedule_free_adamw(0.05, b1=0.9, b2=0.95, eps=1e-6, weight_decay=0.1)
    target = jnp.asarray(np.random.default_rng(0).normal(size=(6, 5)), jnp.float32)
    slope = jax.grad(lambda p: (jnp.abs(p["a"] - target) ** 1.5).sum())
    params = {"a": jnp.zeros((6, 5))}
    ours = make_optimizer(config, Traits(*({"a": x} for x in (True, False, 1.0, False, False))))
    x, state, y, their_state = params, ours.init(params), params, theirs.init(params)
    for _ in range(20):
        assert np.allclose(gradient_point(state, x)["a"], y["a"], atol=1e-6)
        updates, state = ours.update(slope(gradient_point(state, x)), state, x, learning_rate=config.learning_rate)
        x = optax.apply_updates(x, updates)
        updates, their_state = theirs.update(slope(y), their_state, y)
        y = optax.apply_updates(y, updates)
        assert np.allclose(x["a"], optax.contrib.schedule_free_eval_params(their_state, y)["a"], atol=1e-5)
    assert np.abs(x["a"] - y["a"]).max() > 1e-3


def test_warmup_steps_weigh_less_in_the_average():
    """The weight of a step is its squared learning rate."""
    config = settings(optimizer="schedule_free_adamw", warmup_steps=4, b1=0.9, weight_decay=0.0, learning_rate=0.4)
    params = {"a": jnp.zeros(3)}
    optimizer = make_optimizer(config, Traits(*({"a": x} for x in (False, False, 1.0, False, False))))
    state, moved, points = optimizer.init(params), 0.0, []
    for step in range(6):
        rate = 0.4 * min(step + 1, 4) / 4
        updates, state = optimizer.update({"a": jnp.ones(3)}, state, params, learning_rate=jnp.float32(rate))
        params = optax.apply_updates(params, updates)
        moved -= rate
        points.append((rate**2, moved))
    expected = sum(w * z for w, z in points) / sum(w for w, _ in points)
    assert np.allclose(params["a"], expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"schedule": "constant", "warmup_steps": 4}, [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1, 1]),
        ({"schedule": "step", "boundaries": (3, 7)}, [1, 1, 1, 0.1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01]),
        ({"schedule": "step", "boundaries": (6,), "warmup_steps": 2}, [0.5, 1, 1, 1, 1, 1, 0.1, 0.1, 0.1, 0.1]),
        ({"schedule": "linear", "end_learning_rate": 0.5}, [1 - 0.05 * i for i in range(10)]),
        ({"schedule": "linear", "decay_steps": 4}, [1, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        (
            {"schedule": "linear", "decay_steps": 5, "warmup_steps": 2, "end_learning_rate": 0.5},
            [0.5, 1, 1, 1, 1, 1, 0.9, 0.8, 0.7, 0.6],
        ),
        ({"schedule": "cosine", "decay_steps": 4}, [1] * 6 + [0.5 * (1 + np.cos(np.pi * i / 4)) for i in range(4)]),
        ({"schedule": "sqrt"}, [1 - np.sqrt(i / 10) for i in range(10)]),
        (
            {"schedule": "sqrt", "decay_steps": 4, "warmup_steps": 2, "end_learning_rate": 0.2},
            [0.5, 1, 1, 1, 1, 1, *(0.2 + 0.8 * (1 - np.sqrt(i / 4)) for i in range(4))],
        ),
        ({"schedule": "cosine"}, [0.5 * (1 + np.cos(np.pi * i / 10)) for i in range(10)]),
    ],
    ids=lambda x: x["schedule"] if isinstance(x, dict) else "",
)
def test_the_learning_rate_of_each_step(keys, expected):
    rate = learning_rate(settings(learning_rate=1.0, steps=10, **keys))
    assert np.allclose([rate(i) for i in range(10)], expected, rtol=1e-5)
