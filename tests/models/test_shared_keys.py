"""Keys that many families share: the width of a head."""

import math

import jax
import numpy as np
import pytest
from flax import nnx

from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, complete, unused_keys
from models.cases import FORM, assert_close, case, real_tokens, standard_segment_ids, tokens

# Heads whose widths together are not D, which they do not divide.
KEYS = {"head_dim": 6, "num_heads": 3}
# Half of these heads attend, on channels that all heads divide.
THEIRS = {"lite_transformer": {"num_heads": 4}, "longformer": {"window.global_tokens": 2}}
READERS = [name for name in FAMILIES if "model.head_dim" not in unused_keys([name])]
QUICK = ("transformer_plus_plus", "longformer", "linear_transformer")  # softmax, a window, a sum
each_reader = pytest.mark.parametrize(
    "family",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow("compiles a model")) for name in READERS],
)


def build(family: str):
    return case(family, FORM[family], **KEYS | THEIRS.get(family, {}))


def lowered(model) -> str:
    return model.logits.lower(model.params, tokens(), standard_segment_ids(model.family)).as_text()


@each_reader
def test_layers_equal_their_equations(family):
    model, segment_ids = build(family), standard_segment_ids(family)
    logits, _, grads = model.run(segment_ids)
    keep = real_tokens(segment_ids)
    assert_close(logits[keep], model.oracle(segment_ids)[keep], 1e-5)
    for path, grad in jax.tree_util.tree_leaves_with_path(grads["layers"]):
        assert np.linalg.norm(grad) > 1e-3, f"no gradient at {jax.tree_util.keystr(path)}"


@pytest.mark.parametrize("family", READERS)
def test_flops_count_each_weight_of_the_maps(family):
    mixer = build(family).abstract.layers.sublayers[FAMILIES[family].mixer]
    kernels = {path: x for path, x in nnx.to_flat_state(nnx.state(mixer, nnx.Param)) if path[-1] == "kernel"}
    of_a_layer = [math.prod(x.shape[1:]) for path, x in kernels.items() if "taps" not in path]  # counted by layer
    assert mixer.projection_weights == sum(of_a_layer)


@pytest.mark.parametrize("family", READERS)
def test_the_width_that_is_open(family):
    """The same program."""
    shape = {"model_dim": 32, "num_heads": 2}
    assert lowered(case(family, FORM[family], **shape)) == lowered(case(family, FORM[family], head_dim=16, **shape))


def test_families_without_heads_of_a_width_refuse_it():
    for family in set(FAMILIES) - set(READERS):
        with pytest.raises(InputError, match=r"^model.head_dim=8 has no meaning in .*: leave it open"):
            case(family, FORM[family], head_dim=8)
    assert complete(case("flash", True, pattern=("flash", "transformer"), head_dim=8).config).head_dim == 8


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("transformer_plus_plus", {"head_dim": 7}, "the head width 7 must be even"),
        ("transformer_plus_plus", {"num_heads": 3}, "must be a multiple of model.num_heads=3"),
        ("retnet", {"pattern": ("retnet", "transformer"), "head_dim": 8, "num_heads": 3}, "must be a multiple"),
        ("lite_transformer", {"head_dim": 8, "num_heads": 3}, "must be a multiple"),
    ],
)
def test_heads_without_a_width(family, keys, message):
    with pytest.raises(InputError, match=message):
        case(family, True, **keys)
