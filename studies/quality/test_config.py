"""The table of the study: its models are as large as each other, start alike, and can run."""

import itertools
import pathlib

import numpy as np
import pytest
from flax import nnx
from oracles import families as oracle_families

from flash_lm import build_model
from flash_lm.cli.load import load_module
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse_model
from flash_lm.families.family import FAMILIES, complete, layer_configs
from flash_lm.layers.dense import Output
from flash_lm.models.facts import facts
from flash_lm.models.model_inputs import ModelInputs
from studies.quality.run import list_trunks, schedules

TABLE = load_module("studies/quality/config.py")
VARIANTS = {name: TABLE.MODELS["flash_scores"] | changes for name, changes in TABLE.ABLATIONS.items()}
BY_RULE = {k: changes for k, changes in (TABLE.MODELS | VARIANTS).items() if not k.endswith("_as_init")}
# Families that are not in the study have its rule, too, unless each layer ends with a norm, whatever it adds.
OTHERS = FAMILIES.keys() - {changes["model.family"] for changes in TABLE.MODELS.values()}
OTHERS -= {name for name, row in oracle_families.FAMILIES.items() if row.ends_with_norm}
STARTS = BY_RULE | {name: {"model.family": name, "model.causal": None} for name in sorted(OTHERS)}


def make_config(changes):
    config = apply_changes(TABLE.get_config(), changes)
    config.model.vocab_size = config.data.vocab_size
    return config


def test_the_models_of_the_study_have_one_size():
    sizes = {}
    for name, changes in (TABLE.MODELS | VARIANTS | TABLE.LARGE).items():
        config = make_config(changes)
        sizes[name] = facts(config.model.family, config.model, (), ()).parameters
    assert len(TABLE.MODELS) == 16 and len(sizes) == 28 + 2
    small, large = ({k: x for k, x in sizes.items() if (k in TABLE.LARGE) == big} for big in (False, True))
    for (one, a), (other, b) in [*itertools.combinations(small.items(), 2), *itertools.combinations(large.items(), 2)]:
        assert max(a, b) / min(a, b) <= 1.03, (one, a, other, b)
    assert all(4.9e6 < size < 5.1e6 for size in large.values())


class Unchanged(nnx.Module):
    """Replaces the last norm."""

    def __call__(self, x_BxLxD):
        return x_BxLxD


def stream_deviation(model):
    """Returns the standard deviation of the residual stream after the last layer."""
    inputs_1xL = np.random.default_rng(0).integers(0, TABLE.WORDS, (1, 512)).astype(np.int32)
    model.norm = Unchanged()
    return float(nnx.jit(lambda model, inputs: model.features(ModelInputs(inputs)))(model, inputs_1xL).std())


def zero_sublayers(model):
    """Zeroes the last map of every sublayer, so that sublayers add nothing; returns the model."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Output):
            node.kernel[...] *= 0
    return model


@pytest.mark.slow("builds and runs two models of each part")
@pytest.mark.parametrize("name", STARTS)
def test_only_what_adds_little_by_itself_starts_as_it_is(name):
    changes = STARTS[name]
    model = lambda: build_model(make_config(changes | {"model.residual_init": "as_init"}).model, rngs=nnx.Rngs(0))
    adds_little = stream_deviation(model()) <= TABLE.MOST_ADDED * stream_deviation(zero_sublayers(model()))
    assert make_config(changes).model.residual_init == ("as_init" if adds_little else "depth")


@pytest.mark.parametrize("name", STARTS)
def test_models_start_as_by_default(name):
    changes = STARTS[name]
    by_default = complete(parse_model(make_config(changes | {"model.residual_init": None}).model))
    starts = {layer.residual_init for layer in layer_configs(by_default)}
    assert starts == {make_config(changes).model.residual_init}


def test_the_parts_of_the_study_can_run():
    config = apply_changes(
        TABLE.get_config(), {"data.path": "x", "data.tokens_per_batch": 8 * 4096}
    )  # for eight devices
    trunks = list_trunks(config, TABLE.get_parts())
    assert len({trunk.name for trunk in trunks}) == len(trunks) == 14 + 8 + 6 + 6 + 3 + 3 + 39 + 4 + 2
    assert {trunk.tuned_as for trunk in trunks} == set(TABLE.MODELS)
    for trunk in trunks:
        assert schedules(trunk, 1e-3, pathlib.Path("runs"))  # their decays begin at checkpoints


def test_hypotheses_are_on_models_of_their_parts():
    models = {(part.name, model) for part in TABLE.get_parts() for model in part.models}
    for hypothesis in TABLE.get_hypotheses():
        assert {(hypothesis.part, hypothesis.first), (hypothesis.part, hypothesis.second)} <= models, hypothesis.text
