"""Families with softmax attention by libraries, against their oracles: every softmax part, packed and in decoding.

Here splash attention is interpreted, and XLA computes what cuDNN would be asked for.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ops.test_fused_attention import fake_cudnn, run_here  # noqa: F401 (fixtures)

from flash_lm import build_model
from flash_lm.families.family import FAMILIES
from flash_lm.families.flash import GAUOptions
from flash_lm.layers.quadratic_core import QuadraticOptions
from flash_lm.ops.fused_attention import LIBRARIES
from flash_lm.ops.implementations import recorded
from models.cases import (
    BATCH,
    LENGTH,
    PACKED,
    Case,
    assert_close,
    assert_trees_close,
    case,
    model_config,
    real_tokens,
    standard,
    tokens,
)
from models.test_encoder_decoder import SOURCE_IDS, model, source

pytestmark = pytest.mark.group("fused_attention")

# Keys with which a family is pure softmax attention.
KEYS = {"longformer": {"window.growth": 1.0, "window.dilations": (1,), "window.dilated_heads": 0}}
SOFTMAX = [
    name
    for name, row in FAMILIES.items()
    for sections in [{kind for spec in row.sublayers for kind in spec.sections}]
    if QuadraticOptions in sections and GAUOptions not in sections
]
QUICK = {("cudnn", "transformer_plus_plus", True), ("cudnn", "transformer_plus_plus", False), ("cudnn", "mc_tfm", True)}
QUICK |= {("splash", "transformer_plus_plus", True), ("splash", "longformer", True)}
CASES = [
    pytest.param(*one, marks=() if one in QUICK else pytest.mark.slow("the same code in another family or form"))
    for library in ("cudnn", "splash")
    for family in SOFTMAX
    for causal in (True, False)
    for one in [(library, family, causal)]
]


@functools.cache
def fused(library: str, family: str, causal: bool, **more) -> Case:
    return Case(family, causal, {"quadratic.implementation": library, **KEYS.get(family, {}), **more})


@pytest.mark.parametrize(("library", "family", "causal"), CASES)
def test_logits_and_gradients(library, family, causal, run_here):  # noqa: F811
    one, keep = fused(library, family, causal), real_tokens(PACKED)
    with recorded() as said:
        logits, loss, grads = one.run(PACKED)
    assert {sentence.split(",")[0] for sentences in said.values() for sentence in sentences} == {library}, said
    assert_close(logits[keep], one.oracle(PACKED)[keep], 1e-5)
    reference = standard(family, causal) if family not in KEYS else case(family, causal, **KEYS[family]).run(PACKED)
    assert loss == pytest.approx(reference[1], rel=1e-5)
    assert_trees_close(grads, reference[2], 1e-5)


@pytest.mark.parametrize(
    ("library", "family"),
    [
        ("cudnn", "transformer_plus_plus"),
        pytest.param("cudnn", "mc_tfm", marks=pytest.mark.slow("decodes with XLA's form in any case")),
        pytest.param("splash", "longformer", marks=pytest.mark.slow("decodes with XLA's form in any case")),
    ],
)
def test_prompts_and_tokens(library, family, run_here):  # noqa: F811
    """A prompt, of another length in each sequence, in two pieces, and then a token."""
    one, expected = fused(library, family, True), None
    expected = one.oracle(None)
    state, start = one.init_state(), np.zeros(BATCH, np.int32)
    for lengths in ([9, 5], [6, 9]):
        rows = np.stack([tokens()[b, start[b] : start[b] + 9] for b in range(BATCH)])
        logits, state = one.prefill(one.params, rows, state, np.array(lengths, np.int32))
        for b, length in enumerate(lengths):
            assert_close(np.asarray(logits)[b, :length], expected[b, start[b] : start[b] + length], 1e-5)
        start += lengths
    logits, _ = one.step(one.params, tokens()[np.arange(BATCH), start], state)
    assert_close(np.asarray(logits), expected[np.arange(BATCH), start], 1e-5)


@pytest.mark.parametrize(
    "library", ["cudnn", pytest.param("splash", marks=pytest.mark.slow("the same code with another library"))]
)
def test_cross_attention_and_its_encoder(library, run_here):  # noqa: F811
    one, keep = model("transformer", **{"quadratic.implementation": library}), real_tokens(PACKED)
    with recorded() as said:
        logits = one.logits(one.params, tokens(), PACKED, source=source(), source_segment_ids=SOURCE_IDS)
    assert set(said) == {"softmax attention", "cross attention"}
    assert {sentence.split(",")[0] for sentences in said.values() for sentence in sentences} == {library}
    assert_close(np.asarray(logits)[keep], one.oracle()[keep], 1e-5)


def test_decoding_with_a_memory(run_here, monkeypatch):  # noqa: F811
    """A prompt that a chosen library cannot read is no error: each prompt has another length."""
    one = model("transformer", **{"quadratic.implementation": "splash"})
    expected = one.oracle(segment_ids=np.ones((BATCH, LENGTH), np.int32), source_ids=np.ones((BATCH, 13), np.int32))
    refuses = lambda q, structure: f"{q.shape[2]} queries are too few" if q.shape[2] < 9 else None
    monkeypatch.setitem(LIBRARIES, "splash", LIBRARIES["splash"]._replace(refuses=refuses))
    bound = one.bind(one.params)
    state = jax.jit(lambda params, *args: one.bind(params).encode_source(*args))(
        one.params, source(), bound.init_state(BATCH), np.full(BATCH, 13)
    )
    with recorded() as said:
        logits, _ = jax.jit(lambda params, *args: one.bind(params).prefill(*args))(one.params, tokens()[:, :5], state)
    assert said["cross attention"] == ["blocked, not splash: 5 queries are too few"]
    assert_close(logits, expected[:, :5], 1e-5)


SAID = {
    ("flash_quad", "gau.attention_function"): {"softmax attention": ["blocked, since libraries do not take its bias"]},
    ("flash", "gau.attention_function"): {
        "softmax inside chunks": [
            "compiled by XLA, since libraries do not take its bias or the neighbouring chunks",
        ]
    },
    ("mc_tfm", "chunks.overlapping"): {
        "softmax inside chunks": [
            "compiled by XLA, since libraries do not take its bias or the neighbouring chunks",
        ]
    },
    ("longformer", "window.global_tokens"): {
        "softmax attention": ["bands of blocks, for global tokens, dilation or windows that differ by layer"]
    },
}
VALUES = {"gau.attention_function": "softmax", "chunks.overlapping": True, "window.global_tokens": 3}


@pytest.mark.parametrize(("family", "key"), SAID)
def test_softmax_that_no_library_computes_says_so(family, key, fake_cudnn):  # noqa: F811
    one = Case(family, True, {key: VALUES[key]})
    with recorded() as said:
        jax.eval_shape(one.logits, one.params, tokens())
    assert said == SAID[family, key]


def test_gated_units_keep_their_functions(fake_cudnn):  # noqa: F811
    """A GAU without softmax is none of a library's business."""
    for family, more in {"flash_quad": {}, "flash": {}, "adaptive_span": {}}.items():
        with recorded() as said:
            jax.eval_shape(Case(family, True, more).logits, Case(family, True, more).params, tokens())
        assert ("attention" in str(said) or family == "adaptive_span") and "cudnn" not in str(said), (family, said)


# The program for a GPU.


def calls_of_cudnn(*, packed: bool = False, length: int = 28, **more) -> list[str]:
    """Calls of cuDNN in the program of a loss and its gradient, lowered for a GPU."""
    config = model_config("transformer_plus_plus", True, **{"dtype": "bfloat16", "model_dim": 128, **more})
    graph, state, rest = nnx.split(nnx.eval_shape(lambda: build_model(config, rngs=nnx.Rngs(0))), nnx.Param, ...)
    ids = PACKED[:, :length] if packed else None

    def loss(state):
        return nnx.merge(graph, state, rest)(tokens()[:, :length], ids).astype(jnp.float32).sum()

    text = jax.jit(jax.grad(loss)).trace(state).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"__cudnn\$(\w+)", text)


FORWARD, BACKWARD = "fmhaSoftmax", "fmhaSoftmaxBackward"


def test_the_default_on_a_gpu_is_cudnn(fake_cudnn):  # noqa: F811
    """In half precision, for even lengths."""
    assert calls_of_cudnn() == [FORWARD, BACKWARD]
    assert calls_of_cudnn(packed=True) == ["fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"]
    assert not calls_of_cudnn(dtype="float32")
    assert not calls_of_cudnn(length=27)
    assert not calls_of_cudnn(**{"quadratic.implementation": "blocked"})


def test_remat_products_saves_the_output_of_cudnn(fake_cudnn):  # noqa: F811
    assert calls_of_cudnn(remat="products") == [FORWARD, BACKWARD]
    assert calls_of_cudnn(remat="full") == [FORWARD, FORWARD, BACKWARD]
