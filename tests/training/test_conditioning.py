"""Training with a prefix or a source: on a mesh, with accumulation, and on pairs of texts."""

import functools
import json

import jax
import numpy as np
import pytest
from small import small_config

from flash_lm import load
from flash_lm.config.experiment import parse
from flash_lm.config.registry import TASKS
from flash_lm.data.batches import stack
from flash_lm.data.examples import ExampleRows
from flash_lm.data.pairs import SourceRows
from flash_lm.data.prefixes import example_prefix
from flash_lm.data.share import single_host_share
from flash_lm.data.synthetic.copying import copying
from flash_lm.families.family import complete, complete_config
from flash_lm.inference.scoring import evaluate
from flash_lm.timing.bare_step import BareStep
from flash_lm.training.optimizer import make_optimizer
from flash_lm.training.sharding import batch_sharding, make_mesh, shard_batch, state_shardings
from flash_lm.training.train_loop import train
from flash_lm.training.train_state import ModelFunction, init_state
from flash_lm.training.train_step import make_scheduled_step

pytestmark = pytest.mark.usefixtures("usual_promotion")
FORMS = {
    "prefix": {"task": "prefix_lm", "model.family": "flash_quad"},
    "source": {"task": "seq2seq", "model.family": "transformer", "model.encoder.family": "flash_quad"},
    "gau": {
        "task": "seq2seq",
        "model.family": "flash",
        "model.encoder.family": "transformer",
        "model.cross.kind": "gau",
    },
}
ROWS = 8


@functools.cache
def losses(form: str, shape: tuple[int, ...] = (1, 1, 1), accumulate: int = 1) -> np.ndarray:
    """Loss and gradient norm of two steps."""
    config, corpus = small_config("corpus", "cache"), copying()
    config.data.update(corpus="copy", path=None, pack="examples")
    config.update_from_flattened_dict(FORMS[form])
    config.model.update(vocab_size=64, dropout=0.0)
    config.train.update(warmup_steps=0, eps=1e-3, accumulate=accumulate, label_smoothing=0.1)
    config.mesh.shape = shape
    parsed = parse(config)
    model = ModelFunction(complete(parsed.model), seed=0)
    optimizer = make_optimizer(parsed.train, model.traits())
    mesh = make_mesh(parsed.mesh, jax.devices()[: np.prod(shape)])
    abstract = jax.eval_shape(lambda: init_state(model, optimizer))
    shardings = state_shardings(abstract, model.traits().matrix, optimizer, parsed.mesh, mesh)
    kind = ExampleRows if form == "prefix" else SourceRows
    rows = kind(corpus.splits["train"], parsed.data.length, corpus.tokenizer.begin)
    get_row = (lambda i: example_prefix(rows[i])) if form == "prefix" else rows.__getitem__
    metrics_of_steps = []
    with jax.set_mesh(mesh):
        state = jax.jit(lambda: init_state(model, optimizer), out_shardings=shardings)()
        step = jax.jit(
            make_scheduled_step(model, optimizer, parsed.train, 0, TASKS[parsed.task]), out_shardings=(shardings, None)
        )
        for i in range(2):
            batch = stack([get_row(i * ROWS + n) for n in range(ROWS)])
            state, metrics = step(state, shard_batch(batch, batch_sharding(mesh), single_host_share(ROWS)))
            metrics_of_steps.append([float(metrics[name]) for name in ("loss", "label_smoothing", "grad_norm")])
    return np.array(metrics_of_steps)


@pytest.mark.slow("compiles three training steps for each form")
@pytest.mark.parametrize("form", FORMS)
def test_a_mesh_and_accumulation_change_nothing(form):
    expected = losses(form)
    np.testing.assert_allclose(losses(form, shape=(2, 2, 2)), expected, rtol=1e-4)
    np.testing.assert_allclose(losses(form, accumulate=2), expected, rtol=1e-4)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """The second text is the first one in capital letters."""
    folder = tmp_path_factory.mktemp("pairs")
    rng = np.random.default_rng(0)
    texts = ["".join(rng.choice(list("abcdef"), rng.integers(2, 6))) for _ in range(64)]
    lines = [json.dumps({"small": text, "large": text.upper()}) for text in texts]
    for split in ("train", "validation", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.mark.slow("trains a run of 250 steps for each form")
@pytest.mark.parametrize("form", ["prefix", "source"])
def test_second_texts_are_learned_from_pairs(pairs, tmp_path, form):
    """Training lasts until the model has learned them; the output ends with an end token."""
    config = small_config(str(pairs), tmp_path / "cache")
    config.data.update(corpus="hf", text_column="small", pair_column="large", pack="examples")
    config.update_from_flattened_dict(FORMS[form] | {"model.dropout": 0.0, "model.model_dim": 32})
    config.train.update(steps=250, eval_every=0, checkpoint_every=0, learning_rate=1e-2, log_every=50)
    train(config, tmp_path / "run")
    (scores,) = evaluate(tmp_path / "run", "test", [])
    assert scores["accuracy"] > 0.9
    model = load(tmp_path / "run")
    texts = [json.loads(line)["small"] for line in (pairs / "train.jsonl").read_text().splitlines()[:8]]
    outputs = model.generate(texts, max_tokens=8, temperature=0)
    right = [text == first.upper() for text, first in zip(outputs, texts, strict=True)]
    assert sum(right) >= 7, outputs


@pytest.mark.parametrize("form", ["prefix", "source"])
@pytest.mark.slow("compiles a training step or two for each form")
def test_a_step_of_the_benchmarks_uses_the_prefix_or_source(form):
    config = small_config("corpus", "cache")
    config.data.update(corpus="copy", path=None, pack="examples")
    config.update_from_flattened_dict(FORMS[form])
    config.model.update(vocab_size=64, dropout=0.0)
    step = BareStep(complete_config(parse(config)))
    step.start()
    loss = step.step()
    assert np.isfinite(loss)
    if form == "prefix":
        config.task = "causal_lm"
        causal = BareStep(complete_config(parse(config)))
        causal.start()
        assert abs(causal.step() - loss) > 1e-4, "the same tokens, without a prefix"


@pytest.mark.slow("trains three runs")
def test_starting_from_a_model_without_an_encoder_and_back(tmp_path):
    """The layers' parameters keep their paths; new parameters are drawn."""
    config = small_config("corpus", tmp_path / "cache", "flash_quad")
    config.data.update(corpus="copy", path=None, pack="examples")
    config.train.update(steps=1, warmup_steps=0, eval_every=0, checkpoint_every=0)
    train(config, tmp_path / "alone")
    reading = config.copy_and_resolve_references()
    reading.update_from_flattened_dict(
        {"task": "seq2seq", "model.encoder.family": "flash_quad", "model.cross.kind": "gau"}
    )
    reading.train.update(init_from=str(tmp_path / "alone"), learning_rate=1e-12, weight_decay=0.0)
    train(reading, tmp_path / "reading")
    load_params = lambda name: load(tmp_path / name).params
    before, after = load_params("alone"), load_params("reading")
    for name in ("sublayer_0", "sublayer_1", "norm_sublayer_1"):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), before["layers"][name], after["layers"][name]
        )
    assert "cross_0" in after["layers"] and "cross_0" not in before["layers"]

    back = config.copy_and_resolve_references()
    back.train.init_from = str(tmp_path / "reading")
    train(back, tmp_path / "back")
    assert "encoder" not in load_params("back")
