"""Training with a carried state: what it computes, resume, accumulation, the mesh, skipped steps, scores."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.data.carried import CarriedBatches
from flash_lm.data.share import single_host_share
from flash_lm.data.token_cache import KnownCorpus, load_tokenized
from flash_lm.data.tokenized_text import TokenizedText
from flash_lm.errors import InputError
from flash_lm.evaluate import main as evaluate_command
from flash_lm.families.family import complete
from flash_lm.inference.model import load_model
from flash_lm.inference.scoring import evaluate
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.training.setup import build_setup
from flash_lm.training.sharding import batch_sharding, make_mesh, shard_batch
from flash_lm.training.train_loop import train
from flash_lm.training.train_state import init_state
from flash_lm.training.train_step import make_scheduled_step
from training.runs import losses, stop_after

pytestmark = pytest.mark.usefixtures("usual_promotion")

B, L, STEPS, VOCAB = 8, 32, 6, 64
ANOTHER_MESH = pytest.mark.slow("compiles the training step for another mesh")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    config = small_config(write_corpus(folder / "text", documents=24, lines=40), folder / "cache", "flash")
    config.model.dropout = 0.1
    config.train.carry_state = True
    return config


def text() -> TokenizedText:
    """Documents of several sequences, of one sequence, and of a part of one."""
    sizes = np.random.default_rng(0).integers(5, 5 * L, size=20)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.random.default_rng(1).integers(3, VOCAB, size=starts[-1])
    return TokenizedText(tokens.astype(np.uint16), starts, 1, 1, 1)


def batches(count: int = STEPS) -> list:
    return list(itertools.islice(CarriedBatches(text(), L, single_host_share(B), seed=0), count))


class Run:
    """A few steps on the batches; with a learning rate near zero the parameters stay as they are."""

    def __init__(self, family="flash", shape=(1, 1, 1), devices=1, **train_keys):
        config = small_config("", __file__, family)
        config.model.update(vocab_size=VOCAB, dropout=0.0)
        config.train.update(carry_state=True, warmup_steps=0, eps=1e-3, **train_keys)
        config.data.path, config.mesh.shape = "unused", shape
        parsed = parse(config)
        parsed = dataclasses.replace(parsed, model=complete(parsed.model))
        mesh = make_mesh(parsed.mesh, jax.devices()[:devices])
        self.setup, self.mesh = build_setup(parsed, mesh), mesh
        setup = self.setup
        shardings = jax.tree.map(lambda x: x.sharding, setup.abstract)
        init = lambda: init_state(setup.model, setup.optimizer, parsed.carried_rows)
        with jax.set_mesh(mesh):
            self.state = jax.jit(init, out_shardings=shardings)()
            self.step = jax.jit(
                make_scheduled_step(setup.model, setup.optimizer, parsed.train, seed=0), out_shardings=(shardings, None)
            )
        self.params = jax.device_get(self.state.params)
        self.losses = []

    def go(self, steps):
        with jax.set_mesh(self.mesh):
            for batch in steps:
                sharded = shard_batch(batch, batch_sharding(self.mesh), single_host_share(B))
                self.state, metrics = self.step(self.state, sharded)
                self.losses.append([float(metrics[name]) for name in ("loss", "grad_norm")])
        return self


def assert_states_close(a, b, rtol=1e-5):
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        assert np.abs(x - y).max() <= rtol * max(np.abs(y).max(), 1e-6), jax.tree_util.keystr(path)


def test_losses_equal_those_of_full_documents():
    """The reference is the parallel form over each document from its start, and the mean over the rows' tokens."""
    run = Run(learning_rate=1e-30).go(batches())
    longest = 6 * L
    compute_logits = jax.jit(lambda row: run.setup.model.bind(jax.tree.map(jnp.asarray, run.params))(row[None])[0])
    so_far = [[] for _ in range(B)]
    for batch, (loss, _) in zip(batches(), run.losses, strict=True):
        total = count = 0
        for b in range(B):
            tokens = int(batch["segment_ids_BxL"][b].sum())
            if batch["positions_BxL"][b, 0] == 0:
                so_far[b] = []
            so_far[b].extend(batch["inputs_BxL"][b, :tokens].tolist())
            document = np.array(so_far[b] + [0] * (longest - len(so_far[b])))
            logits = np.asarray(compute_logits(document), np.float64)[len(so_far[b]) - tokens : len(so_far[b])]
            log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
            total -= log_p[np.arange(tokens), batch["targets_BxL"][b, :tokens]].sum()
            count += tokens
        assert loss == pytest.approx(total / count, rel=1e-5)


@pytest.mark.slow("compiles two training steps")
def test_a_microbatch_carries_the_state_of_its_rows():
    one, four = Run(learning_rate=1e-2).go(batches()), Run(learning_rate=1e-2, accumulate=4).go(batches())
    np.testing.assert_allclose(four.losses, one.losses, rtol=1e-5)
    assert_states_close(four.state.carried, one.state.carried, 1e-4)


@pytest.mark.parametrize(
    "shape",
    [(2, 2, 2), pytest.param((8, 1, 1), marks=ANOTHER_MESH), pytest.param((1, 8, 1), marks=ANOTHER_MESH)],
)
@pytest.mark.slow("compiles the training step for one device and for eight")
@pytest.mark.parametrize("name", ["flash", "transformer_xl"])
def test_the_state_is_sharded_like_the_batch(name, shape):
    one, eight = Run(name).go(batches()), Run(name, shape, devices=8).go(batches())
    np.testing.assert_allclose(eight.losses, one.losses, rtol=1e-5)
    assert_states_close(eight.state.carried, one.state.carried, 1e-4)
    rows = shape[0] * shape[1]
    for leaf in jax.tree.leaves(eight.state.carried.layers):
        assert leaf.sharding.shard_shape(leaf.shape)[1] == B // rows


@pytest.mark.slow("compiles another training step")
def test_a_skipped_step_resets_the_state():
    """Otherwise one number that is not finite would stay in the state for ever."""
    run = Run(learning_rate=1e-2).go(batches(2))
    params = jax.device_get(run.state.params)
    run.state = dataclasses.replace(run.state, params=jax.tree.map(lambda x: x * np.float32(np.inf), run.state.params))
    run.go(batches(3)[2:])
    assert not np.isfinite(run.losses[-1][0])
    expected = run.setup.model.bind(jax.tree.map(jnp.asarray, params)).init_state(B)
    jax.tree.map(np.testing.assert_array_equal, run.state.carried, expected)


@pytest.fixture(scope="module")
def finished_run(config, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "finished"
    train(config, workdir)
    return workdir


@pytest.mark.slow("trains a run and resumes it")
@pytest.mark.parametrize(
    "stop", [3, pytest.param(5, marks=pytest.mark.slow("trains another run; a stop at another step"))]
)
def test_a_resumed_run_is_the_same_to_the_bit(config, finished_run, tmp_path, stop):
    """At 5 the newest checkpoint is the one saved at the stop; it holds the state."""
    train(config, tmp_path / "run", should_stop=stop_after(stop))
    train(config, tmp_path / "run")
    assert losses(tmp_path / "run") == losses(finished_run)


def test_a_resumed_run_keeps_the_dtype_of_its_state(config, finished_run):
    """Other runs may change the dtype, as it concerns decoding only."""
    other = config.copy_and_resolve_references()
    other.model.state_dtype = "bfloat16"
    with pytest.raises(InputError, match="another config .*model.state_dtype"):
        train(other, finished_run)


def test_scores_of_full_documents_have_a_separate_file(finished_run):
    """Readers of results.jsonl compare scores of single sequences."""
    evaluate_command([f"--workdir={finished_run}", "--split=validation", "--carry"])
    assert not (finished_run / "results.jsonl").exists()
    assert [line["carried"] for line in read_jsonl(finished_run / "carried.jsonl")] == [True]
    assert {
        line.get("carried") for line in read_jsonl(finished_run / "metrics.jsonl") if line["split"] == "validation"
    } == {True}


def test_scores_by_position(finished_run):
    """Spans that double cover each token once; the first sequence has no tokens before it."""
    (result,) = evaluate(finished_run, "validation", carry=True)
    (rows,) = evaluate(finished_run, "validation")
    spans = result["by_position"]
    assert result["carried"] and sum(span["tokens"] for span in spans) == result["tokens"] == rows["tokens"]
    assert [(span["from"], span["to"]) for span in spans[:3]] == [(0, 32), (32, 64), (64, 128)]
    assert spans[0]["perplexity"] == spans[0]["perplexity_alone"] != spans[1]["perplexity"]
    nll = sum(span["tokens"] * np.log(span["perplexity"]) for span in spans)
    assert nll == pytest.approx(result["nll"], rel=1e-6)
    assert result["bytes"] == rows["bytes"]
    newest = losses(finished_run)[12, "validation"]
    assert result["loss"] == pytest.approx(newest, rel=1e-6), "validation during training carries, too"
    (first,) = evaluate(finished_run, "validation", carry=True, first=40)
    assert [span["to"] for span in first["by_position"]] == [32, 64] and first["tokens"] < result["tokens"]


def test_scores_equal_those_of_full_documents(finished_run):
    (result,) = evaluate(finished_run, "validation", carry=True)
    trained = load_model(finished_run)
    compute_logits, nll = jax.jit(lambda row: trained.model.bind(trained.params)(row[None])[0]), 0.0
    store = load_tokenized(trained.config.data, KnownCorpus(trained.tokenizer)).splits["validation"]
    longest = np.diff(store.starts).max()
    for a, b in itertools.pairwise(store.starts.tolist()):
        document = np.asarray(store.tokens[a:b], np.int32)
        padded = np.pad(document, (0, longest - len(document)))  # one length, so one compilation
        logits = np.asarray(compute_logits(padded), np.float64)[: len(document) - 1]
        log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        nll -= log_p[np.arange(len(document) - 1), document[1:]].sum()
    assert result["nll"] == pytest.approx(nll, rel=1e-5)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"task": "masked_lm"}, "needs task=causal_lm"),
        ({"data.corpus": "copy", "data.pack": "examples", "data.path": None}, "a corpus of text"),
        ({"data.streaming": True}, "needs data.streaming=False"),
        ({"model.kernels": "pallas"}, "leave model.kernels=auto"),
        ({"model.family": "transformer"}, "end at model.max_length=32"),
        ({"model.family": "transformer_plus_plus"}, "grows with the text"),
    ],
)
def test_configs_that_cannot_carry(config, tmp_path, keys, message):
    wrong = config.copy_and_resolve_references()
    for key, value in keys.items():
        wrong.update_from_flattened_dict({key: value})
    with pytest.raises(InputError, match=message):
        train(wrong, tmp_path / "run")
    assert not (tmp_path / "run" / "config.json").exists()


def test_settings_that_exclude_a_carried_state(config, finished_run, tmp_path):
    with pytest.raises(InputError, match="--debug_nonfinite does not support"):
        train(config, tmp_path / "run", debug_nonfinite=True)
    with pytest.raises(InputError, match="add --carry"):
        evaluate(finished_run, "validation", first=10)
