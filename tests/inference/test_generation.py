"""Generation and scores with a trained model, on other meshes than that of the training."""

import dataclasses
import io
import json
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import small_config, write_corpus

from flash_lm import generate
from flash_lm.cli.run import run
from flash_lm.config.experiment import parse
from flash_lm.data.tokenizer import ByteTokenizer
from flash_lm.data.tokenizers import train_sentencepiece
from flash_lm.errors import InputError
from flash_lm.inference.api import load
from flash_lm.inference.fill_in import Filler
from flash_lm.inference.generation import Generator, TextDecoder
from flash_lm.inference.model import load_model
from flash_lm.inference.settings import BeamSearch, Sampling
from flash_lm.runs.run_name import run_name
from flash_lm.training.checkpoint_read import restore
from flash_lm.training.setup import build_experiment
from flash_lm.training.train_loop import train

pytestmark = pytest.mark.usefixtures("usual_promotion")
GREEDY = Sampling(temperature=0)


class Ascii(ByteTokenizer):
    """A tokenizer without the bytes of rare characters."""

    def token_bytes(self, i):
        return super().token_bytes(i) if i < 132 else b""

    def bytes_per_token(self):
        return np.array([len(self.token_bytes(i)) for i in range(self.vocab_size)], np.int32)


def train_model(folder, **changes):
    config = small_config(write_corpus(folder / "text"), folder / "cache", "flash")
    config.train.update(steps=20, eval_every=0, checkpoint_every=0, log_every=20)
    config.mesh.shape = (2, 2, 2)
    config.update_from_flattened_dict(changes)
    train(config, folder / "run")
    return config, folder / "run"


@pytest.fixture(scope="module")
def causal(tmp_path_factory):
    return train_model(tmp_path_factory.mktemp("causal"))


@pytest.fixture(scope="module")
def generator(causal):
    return Generator(load_model(causal[1]))


@pytest.fixture(scope="module")
def masked_run(tmp_path_factory):
    return train_model(tmp_path_factory.mktemp("masked"), task="masked_lm", **{"mesh.shape": (-1, 1, 1)})[1]


@pytest.fixture(scope="module")
def masked_model(masked_run):
    return load_model(masked_run)


@pytest.mark.slow("loads a checkpoint on other meshes and in another dtype")
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 2, 4), "bfloat16"), pytest.param((2, 2, 2), None, marks=pytest.mark.slow("another mesh"))],
    ids=str,
)
def test_parameters_equal_those_of_the_newest_checkpoint(causal, generator, shape, dtype):
    """On any mesh, in both precisions; the model was trained on a (2, 2, 2) mesh."""
    config, workdir = causal
    experiment = build_experiment(parse(config))
    state, _ = restore(run_name(workdir), experiment.abstract)
    loaded = load_model(workdir, dtype=dtype, mesh_shape=shape)
    assert loaded.step == 20 and loaded.config.model.dtype == (dtype or "float32")

    def check(saved, loaded_param):
        assert loaded_param.dtype == (dtype or "float32")
        np.testing.assert_array_equal(
            np.asarray(loaded_param, np.float32), np.asarray(saved.astype(loaded_param.dtype), np.float32)
        )

    jax.tree.map(check, state.params, loaded.params)
    texts = ["the cat", "a"], [" sees the dog", "naïve"]
    for actual, expected in zip(Generator(loaded).score(*texts), generator.score(*texts), strict=True):
        np.testing.assert_allclose(actual.log_probs, expected.log_probs, atol=5e-2 if dtype else 1e-4)
        assert not dtype or actual.log_probs != expected.log_probs


def test_a_batch_of_prompts_equals_single_prompts(generator):
    prompts = ["a", "the quick cat sees", "naïve 猫"]
    together = generator.generate(prompts, 12, GREEDY)
    for actual, prompt in zip(together, prompts, strict=True):
        (alone,) = generator.generate([prompt], 12, GREEDY)
        # A batch of one compiles to another program than a batch of three, whose sums may round differently.
        assert actual.log_probs == pytest.approx(alone.log_probs, rel=1e-5)
        assert dataclasses.replace(actual, log_probs=alone.log_probs) == alone
        assert actual.text == generator._trained.decode_text(actual.tokens)
        assert len(actual.log_probs) == len(actual.tokens) and max(actual.log_probs) <= 0


def test_seeds_repeat(generator):
    sample = lambda seed: generator.generate(["the"] * 4, 20, Sampling(temperature=1.3), seed)
    assert sample(3) == sample(3)
    assert sample(3) != sample(4)
    assert len({actual.text for actual in sample(3)}) > 1, "rows of the same prompt are drawn apart"


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=2.0)])
def test_streamed_text_equals_the_text(generator, sampling):
    """Also for broken characters; at a high temperature a byte model writes many."""
    (full,) = generator.generate(["the"], 50, sampling, seed=1)
    pieces = list(generator.stream("the", 50, sampling, seed=1))
    assert "".join(pieces) == full.text and all(pieces)
    assert len(pieces) > 2


def test_scores_equal_the_log_probabilities_of_generation(generator):
    prompts = ["a", "the quick cat sees"]
    # Plain characters, which are tokenized to the same tokens again.
    texts = [x for x in generator.generate(prompts, 10, GREEDY) if x.text.isascii()]
    assert texts
    scored = generator.score([x.prompt for x in texts], [x.text for x in texts])
    for one, other in zip(scored, texts, strict=True):
        assert one.tokens == other.tokens
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-4)


@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_no_character_is_split(kind):
    text = "naïve 猫 — 𝔘𝔫𝔦\n"
    tokenizer = ByteTokenizer()
    if kind == "sentencepiece":  # with few pieces, rare characters are bytes
        tokenizer = train_sentencepiece(["the cat sees the dog\n"] * 50, 275)
    (ids,) = tokenizer.encode([text])
    decoder, pieces = TextDecoder(tokenizer), []
    for i in ids.tolist():
        pieces.append(decoder([i]))
        assert "\ufffd" not in pieces[-1]
    assert "".join(pieces) + decoder.close() == text
    assert "" in pieces, "some tokens wait for the next"


def test_a_character_that_never_ends():
    decoder, tokenizer = TextDecoder(ByteTokenizer()), ByteTokenizer()
    (ids,) = tokenizer.encode(["猫"])
    assert decoder(ids[:2].tolist()) == ""
    assert decoder.close() == "\ufffd"


def test_bad_prompts(generator, causal):
    for prompts, max_tokens, message in (
        (["the", ""], 5, "prompt is empty"),
        ([], 5, "no prompt"),
        (["the"], 0, "max_tokens=0 must be from 1 to 1048576"),
        (["the"], 10**12, "max_tokens=1000000000000 must be from 1 to"),
        (["caf\udce9"], 5, "the prompt is not UTF-8 text at character 4"),
    ):
        with pytest.raises(InputError, match=message):
            generator.generate(prompts, max_tokens)
    with pytest.raises(InputError, match="prompt is empty"):
        generator.stream("", 5)
    deaf = dataclasses.replace(generator._trained, tokenizer=Ascii())
    assert len(deaf.encode("a cat")) == 6
    with pytest.raises(InputError, match="does not know what begins with 'ïve cat' in the prompt"):
        deaf.encode("a naïve cat")
    with pytest.raises(
        InputError, match="seed=9223372036854775808 must be from -9223372036854775808 to 9223372036854775807"
    ):
        generator.generate(["the"], 5, seed=2**63)
    with pytest.raises(InputError, match="the continuation is empty"):
        generator.score(["the"], [""])
    with pytest.raises(InputError, match="there is no prompt"):
        generator.score([], [])


def test_positions_that_end(generator, monkeypatch):
    """Pair by pair: the longest prompt need not have the longest continuation."""
    monkeypatch.setattr(generator.engine, "limit", 12)
    assert len(generator.score(["a" * 10, "a"], ["b", "b" * 10])) == 2
    with pytest.raises(
        InputError, match="a prompt of 11 tokens and 2 after it are over the limit of 12 .*shorten one of them"
    ):
        generator.score(["a" * 10], ["bb"])
    with pytest.raises(
        InputError, match="a prompt of 11 tokens and 2 after it are over the limit of 12 .*lower max_tokens"
    ):
        generator.stream("a" * 10, 2)


@pytest.mark.slow("trains a run")
def test_a_prompt_longer_than_the_positions(tmp_path):
    _, workdir = train_model(tmp_path, **{"model.family": "transformer", "train.steps": 3})
    short = Generator(load_model(workdir))
    (texts,) = short.generate(["the"], 28, GREEDY)
    assert len(texts.tokens) == 28 or texts.finish_reason == "end"
    with pytest.raises(InputError, match="a prompt of 4 tokens and 29 after it are over the limit of 32"):
        short.generate(["the"], 29)


@pytest.mark.slow("compiles three shapes of batches")
def test_filling_in(masked_model):
    filler, text = Filler(masked_model), "the cat [MASK]ees the [MASK]og"
    (actual,) = filler([text])
    assert len(actual.masks) == 2 and all(len(mask) == 5 for mask in actual.masks)
    for mask in actual.masks:
        probabilities = [candidate.probability for candidate in mask]
        assert probabilities == sorted(probabilities, reverse=True) and 0 < sum(probabilities) <= 1
    best = [mask[0].text for mask in actual.masks]
    assert actual.text == text.replace("[MASK]", "{}").format(*best)
    # Against the model itself, with any padding and any other texts in the batch.
    ids = filler.encode(text)
    logits = np.asarray(masked_model.model.bind(masked_model.params)(jnp.asarray(ids)[None]), np.float64)[0]
    for index, mask in zip(np.flatnonzero(ids == masked_model.tokenizer.mask), actual.masks, strict=True):
        weights = np.where(masked_model.text_ids(), np.exp(logits[index] - logits[index].max()), 0)
        assert mask[0].token == weights.argmax()
        assert mask[0].probability == pytest.approx(weights.max() / weights.sum(), rel=1e-3)
    assert len(filler([text], 10_000)[0].masks[0]) == 256, "at most one per byte"
    batched = filler(["a [MASK] that is quite a bit longer, so", text])[1]
    assert [[c.token for c in mask] for mask in batched.masks] == [[c.token for c in mask] for mask in actual.masks]


def test_each_kind_of_model_refuses_the_calls_of_the_other(masked_model, generator):
    with pytest.raises(InputError, match="task=masked_lm and cannot continue a text: let it fill in"):
        Generator(masked_model)
    with pytest.raises(InputError, match="task=causal_lm and has no"):
        Filler(generator._trained)
    with pytest.raises(InputError, match="put .MASK. where"):
        Filler(masked_model)(["the cat"])
    with pytest.raises(InputError, match="ask for 1 or more"):
        Filler(masked_model)(["the [MASK]"], 0)


def command(argv: list[str], monkeypatch, capsys, stdin: bytes = b"") -> tuple[int, str, list[str]]:
    """Exit code, output, and the errors."""
    monkeypatch.setattr(sys, "argv", ["generate", *argv])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
    code = 0
    try:
        run(generate.main)
    except SystemExit as stop:
        code = stop.code
    captured = capsys.readouterr()
    return code, captured.out, [line for line in captured.err.splitlines() if line.startswith("error: ")]


def test_the_command(generator, causal, tmp_path, monkeypatch, capsys):
    """Prompts as an argument, a file and standard input; streams, JSON, several samples, a score."""
    say = lambda *argv, stdin=b"": command([f"--workdir={causal[1]}", *argv], monkeypatch, capsys, stdin)
    (expected,) = generator.generate(["the ünder"], 12, GREEDY)
    (tmp_path / "prompt.txt").write_text("the ünder\n", encoding="utf-8")
    greedy = ["--max_tokens=12", "--temperature=0"]
    for source, stdin in (
        (["--prompt=the ünder"], b""),
        ([f"--prompt_file={tmp_path / 'prompt.txt'}"], b""),
        ([], "the ünder\n".encode()),
    ):
        assert say(*source, *greedy, stdin=stdin) == (0, f"the ünder{expected.text}\n", [])
    code, out, _ = say("--prompt=the ünder", *greedy, "--json")
    assert (code, json.loads(out)) == (0, dataclasses.asdict(expected))
    _, out, _ = say("--prompt=the", "--max_tokens=5", "--samples=3", "--json", "--seed=2")
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["the"] * 3
    _, out, _ = say("--prompt=the", "--continuation= cat")
    (scored,) = generator.score(["the"], [" cat"])
    assert out == f"log-probability {sum(scored.log_probs):.4f} nats\n"


@pytest.mark.slow("compiles a search")
def test_the_command_searches(generator, causal, monkeypatch, capsys):
    say = lambda *argv: command(
        [f"--workdir={causal[1]}", "--prompt=the", "--max_tokens=5", *argv], monkeypatch, capsys
    )
    ((best, *others),) = generator.search(["the"], 5, BeamSearch(3, 1.0))
    assert best.score >= others[0].score and best.text != others[0].text
    assert say("--beams=3", "--length_penalty=1") == (0, f"the{best.text}\n\n", [])
    code, out, _ = say("--beams=3", "--length_penalty=1", "--samples=2", "--json")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [dataclasses.asdict(x) for x in (best, others[0])]
    model = load(causal[1])
    assert model.generate("the", 5, beams=3, length_penalty=1.0) == best.text
    with pytest.raises(InputError, match="unknown setting top_k: a beam search has beams, length_penalty"):
        model.generate("the", 5, beams=3, top_k=2)


def test_the_command_fills_in(masked_run, masked_model, monkeypatch, capsys):
    argv = [f"--workdir={masked_run}", "--prompt=the [MASK]at", "--candidates=3"]
    (expected,) = Filler(masked_model)(["the [MASK]at"], 3)
    code, out, _ = command(argv, monkeypatch, capsys)
    assert code == 0 and out.startswith(f"{expected.text}\nmask 1: {expected.masks[0][0].text!r} ")
    _, out, _ = command([*argv, "--json"], monkeypatch, capsys)
    assert json.loads(out)["masks"][0][0]["token"] == expected.masks[0][0].token


BAD_ARGUMENTS = {
    "--prompt=": "the prompt is empty",
    "--prompt_file=/nowhere.txt": "cannot read the prompt from /nowhere.txt: No such file",
    "--prompt=the --top_p=0": "top_p=0.0 must be from 0.000001 to 1",
    "--prompt=the --max_tokens=0": "max_tokens=0 must be from 1 to",
    "--prompt=the --seed=99999999999999999999": "must be from -9223372036854775808 to 9223372036854775807",
    "--prompt=the --continuation=": "the continuation is empty",
    "--prompt=the --candidates=3": "is a causal language model and does not support --candidates",
    "--prompt=the --beams=2 --top_k=3 --seed=1": "a beam search neither samples nor scores a given text: leave out "
    "--top_k, --seed or --beams",
    "--prompt=the --beams=2 --samples=3": "--samples=3 are more than --beams=2 can find",
    "--prompt=the --beams=0 --samples=1": "beams=0 must be from 1 to 256",
    "--prompt=the --length_penalty=1": "--length_penalty is of a beam search: set --beams, too",
    "--prompt=the --samples=0": "--samples=0 must be 1 or more",
    "--prompt=the --mesh=2,2": "--mesh=2,2 must be three integers",
    "--prompt=the --mesh=1,1,8": "does not divide a dimension of 260 of embedding: choose another mesh shape",
    "--prompt=the --mesh=a": "--mesh=a must be three integers",
}


@pytest.mark.parametrize("words", BAD_ARGUMENTS)
def test_bad_input_ends_in_one_line(words, causal, monkeypatch, capsys):
    code, out, errors = command([f"--workdir={causal[1]}", *words.split()], monkeypatch, capsys)
    assert (code, out, len(errors)) == (2, "", 1)
    assert BAD_ARGUMENTS[words] in errors[0]


def test_inputs_that_are_not_text_or_not_a_run(causal, masked_run, tmp_path, monkeypatch, capsys):
    code, _, errors = command([f"--workdir={causal[1]}"], monkeypatch, capsys, stdin=b"abc\xff")
    assert code == 2 and "the prompt is not UTF-8: byte 3 is 0xff" in errors[0]
    code, _, errors = command([f"--workdir={tmp_path}", "--prompt=a"], monkeypatch, capsys)
    assert code == 2 and "holds no run" in errors[0]
    code, _, errors = command([f"--workdir={masked_run}", "--prompt=a cat"], monkeypatch, capsys)
    assert code == 2 and "masked language model, which cannot continue" in errors[0]
    argv = [f"--workdir={masked_run}", "--prompt=a [MASK]", "--top_k=3", "--samples=2"]
    code, _, errors = command(argv, monkeypatch, capsys)
    assert code == 2 and "does not support --samples, --top_k" in errors[0]
    shutil.copytree(causal[1], tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    code, _, errors = command([f"--workdir={tmp_path / 'run'}", "--prompt=a"], monkeypatch, capsys)
    assert code == 2 and "has no checkpoint yet" in errors[0]
