"""Filters against loops over sorted probabilities, draws against their probabilities, settings out of range."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flash_lm.errors import InputError
from flash_lm.inference.sampling import Sampling, SamplingArrays, draw_tokens, random_key

V, DRAWS = 12, 4000
LOGITS = np.random.default_rng(0).normal(size=V).astype(np.float32) * 2
LOGITS[3] = LOGITS[7]  # a tie


@jax.jit
def run(logits_BxV, seen_BxV, keys_B, settings):
    return draw_tokens(logits_BxV, seen_BxV, keys_B, settings)


def draws(sampling: Sampling, seen=(), logits=LOGITS) -> np.ndarray:
    seen_V = np.isin(np.arange(V), seen)
    rows = lambda x: jnp.asarray(np.broadcast_to(x, (DRAWS, V)))
    return np.asarray(
        run(
            rows(logits),
            rows(seen_V),
            jax.random.split(jax.random.key(1), DRAWS),
            SamplingArrays.from_sampling(sampling),
        )
    )


def expected_probabilities(sampling: Sampling, seen=()) -> np.ndarray:
    """Probabilities, filter by filter."""
    logits = [float(x) for x in LOGITS]
    for i in seen:
        penalty = sampling.repetition_penalty
        logits[i] = logits[i] / penalty if logits[i] > 0 else logits[i] * penalty
    weights = {i: np.exp(x / sampling.temperature) for i, x in enumerate(logits)}
    ranked = sorted(weights, key=lambda i: -weights[i])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, kept, mass = sum(weights[i] for i in ranked), [], 0.0
    for i in ranked:
        if mass < sampling.top_p:
            kept.append(i)
        mass += weights[i] / total
    kept = [i for i in kept if weights[i] >= sampling.min_p * weights[ranked[0]]]
    total = sum(weights[i] for i in kept)
    return np.array([weights[i] / total if i in kept else 0.0 for i in range(V)])


SETTINGS = {
    "plain": Sampling(),
    "warm": Sampling(temperature=1.7),
    "cold": Sampling(temperature=0.3),
    "top_k": Sampling(top_k=3),
    "top_k over all": Sampling(top_k=100),
    "top_p": Sampling(top_p=0.8),
    "a tiny top_p": Sampling(top_p=1e-6),
    "min_p": Sampling(min_p=0.2),
    "all": Sampling(temperature=1.5, top_k=8, top_p=0.9, min_p=0.1, repetition_penalty=1.5),
    "penalty": Sampling(repetition_penalty=3.0),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_draws_have_their_probabilities(name):
    seen = (0, 5, int(LOGITS.argmax()))
    probabilities = expected_probabilities(SETTINGS[name], seen)
    counts = np.bincount(draws(SETTINGS[name], seen), minlength=V)
    assert not counts[probabilities == 0].any(), "what is filtered out never comes"
    error = np.sqrt(DRAWS * probabilities * (1 - probabilities))
    assert (np.abs(counts - DRAWS * probabilities) <= 4.5 * error + 1e-9).all()


def test_a_temperature_of_zero_is_greedy():
    best = int(LOGITS.argmax())
    assert (draws(Sampling(temperature=0)) == best).all()
    penalised = draws(Sampling(temperature=0, repetition_penalty=100.0), seen=(best,))
    assert (penalised == int(np.argsort(-LOGITS)[1])).all()


def test_forbidden_tokens_are_never_drawn():
    logits = np.where(np.arange(V) % 2 == 0, -np.inf, LOGITS).astype(np.float32)
    for sampling in SETTINGS.values():
        assert (draws(sampling, logits=logits) % 2 == 1).all()


def test_filters_without_effect_change_no_draw():
    plain = draws(Sampling())
    np.testing.assert_array_equal(draws(Sampling(top_k=V)), plain)
    np.testing.assert_array_equal(draws(Sampling(min_p=1e-30)), plain)


def test_values_are_arguments_of_one_compiled_function():
    before = run._cache_size()
    for temperature in (0.0, 0.4, 1.3):
        draws(Sampling(temperature=temperature))
        draws(Sampling(temperature=temperature, top_k=2))
    assert run._cache_size() <= max(before, 2)


BAD = {
    "temperature": (-0.1, 1e-9, 1e39, float("nan"), float("inf")),
    "top_k": (-1, 3_000_000_000),
    "top_p": (0.0, 1e-50, 1.1, float("nan")),
    "min_p": (-0.1, 1.5),
    "repetition_penalty": (0.0, 1e-50, -1.0, float("nan")),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_settings_out_of_range_are_refused(name, value):
    with pytest.raises(InputError, match=f"{name}=.* must be"):
        Sampling(**{name: value})


def test_all_errors_are_reported_at_once():
    with pytest.raises(InputError) as error:
        Sampling(temperature=-1, top_p=2)
    assert len(str(error.value).splitlines()) == 2
    assert {f.name for f in dataclasses.fields(Sampling)} == set(BAD)


def test_a_key_has_all_64_bits_of_its_seed():
    for seed in (0, 5, 2**32 - 1):
        assert random_key(seed) == jax.random.key(seed)  # as JAX does for these seeds
    seeds = [0, 5, -5, 2**32 - 5, 2**32, 2**32 + 5, 2**40, 2**40 + 5, 2**63 - 1, -(2**63), -1, 2**32 - 1]
    keys = {tuple(np.asarray(jax.random.key_data(random_key(seed))).tolist()) for seed in seeds}
    assert len(keys) == len(seeds)
