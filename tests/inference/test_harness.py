"""The adapter for the lm-evaluation-harness against the logits of the model, and tasks run by the harness."""

import math
import types

import numpy as np
import pytest
from small import ROOT, command, documents, finish, small_config, write_corpus

import flash_lm

lm_eval = pytest.importorskip("lm_eval", reason="lm_eval is an extra: pip install -e '.[harness]'")

from lm_eval.api.instance import Instance  # noqa: E402
from lm_eval.models.openai_completions import LocalCompletionsAPI  # noqa: E402

from flash_lm.data.token_cache import load_corpus  # noqa: E402
from flash_lm.errors import InputError  # noqa: E402
from flash_lm.inference.generation import Generator  # noqa: E402
from flash_lm.inference.harness import HarnessModel  # noqa: E402
from flash_lm.inference.model import load_model  # noqa: E402
from flash_lm.inference.sampling import Sampling  # noqa: E402
from flash_lm.inference.scoring import evaluate  # noqa: E402
from flash_lm.runs.jsonl import read_jsonl  # noqa: E402
from flash_lm.training.train_loop import train  # noqa: E402
from inference.service.serving import random_model, service  # noqa: E402

pytestmark = [
    pytest.mark.usefixtures("usual_promotion"),
    pytest.mark.slow("loads lm_eval, and compiles each kind of request"),
]

TEXTS = ["the cat sees the dog", "a", "one two three four five six seven eight nine ten " * 3, "é naïve tree"]


def requests(*arguments):
    return [types.SimpleNamespace(args=one) for one in arguments]


@pytest.fixture(
    scope="module",
    params=["flash", pytest.param("linear_transformer", marks=pytest.mark.slow("another family: the same code"))],
)
def trained_model(request):
    return random_model("text", request.param)


@pytest.fixture(scope="module")
def model(trained_model):
    return HarnessModel(trained_model)


def compute_log_probs(trained_model, ids):
    """Log-probability of each token after the first, by the parallel form, in float64."""
    logits = trained_model.logits(ids[:-1]).astype(np.float64)
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return logits[np.arange(len(ids) - 1), ids[1:]], logits.argmax(-1) == ids[1:]


def test_continuations_have_the_log_likelihood_of_the_parallel_form(model, trained_model):
    begin, encode = trained_model.tokenizer.begin, lambda text: trained_model.tokenizer.encode([text])[0].tolist()
    pairs = [("the cat", " sees"), ("", "the dog"), ("a b ", "c"), ("the", " cat sees")]
    scores = model.loglikelihood(requests(*pairs))
    for (context, continuation), (log_likelihood, greedy) in zip(pairs, scores, strict=True):
        ids = [begin, *encode(context + continuation)]
        count = (
            len(encode(continuation)) + len(context) - len(context.rstrip())
        )  # in bytes: trailing spaces move to the continuation
        log_probs, likeliest = compute_log_probs(trained_model, ids)
        assert log_likelihood == pytest.approx(log_probs[-count:].sum(), abs=1e-3)
        assert greedy == likeliest[-count:].all()


def test_scores_do_not_depend_on_other_requests(model):
    """In more than one batch of mixed lengths, in another order, and one by one."""
    pairs = [("the cat " * (i % 5), "sees a dog "[: 1 + i % 11]) for i in range(40)]
    ask = lambda numbers: [x for x, _ in model.loglikelihood(requests(*(pairs[i] for i in numbers)))]
    actual = np.array(ask(range(40)))
    order = np.random.default_rng(0).permutation(40)
    np.testing.assert_allclose(ask(order), actual[order], atol=1e-4)
    np.testing.assert_allclose([ask([i])[0] for i in range(0, 40, 7)], actual[::7], atol=1e-4)


def test_a_continuation_that_merges_with_its_context_is_tokenized_separately(model, monkeypatch):
    """For instance if "new" and "s" are two tokens, and "news" is one."""
    encode = model.tok_encode
    joined = lambda text, **settings: encode(text.replace("cats", "c"), **settings)
    monkeypatch.setattr(model, "tok_encode", joined)
    (scores,) = model.loglikelihood(requests(("the cat", "s")))
    monkeypatch.undo()
    (apart,) = model._loglikelihood_tokens([(None, encode("the cat"), encode("s", add_special_tokens=False))])
    assert scores == apart and scores[0] < 0
    with pytest.raises(InputError, match="there is nothing to score after 'the cat': the task has an empty choice"):
        model.loglikelihood(requests(("the cat", "")))


def test_a_greedy_continuation_of_the_model_is_greedy(model, trained_model):
    (said,) = Generator(trained_model).generate(["the cat"], 5, Sampling(temperature=0.0))
    begin = trained_model.tokenizer.encode(["the cat"])[0].tolist()
    context = [trained_model.tokenizer.begin, *begin]
    other = [*said.tokens[:-1], (said.tokens[-1] + 1) % 256]
    (same, different) = model._loglikelihood_tokens([(None, context, said.tokens), (None, context, other)])
    assert same[1] and not different[1]
    assert same[0] == pytest.approx(sum(said.log_probs), abs=1e-3)


def test_a_long_context_loses_its_beginning(model):
    long = "x" * 200
    (cut,) = model.loglikelihood(requests((long, "yz")))
    (other,) = model.loglikelihood(requests(("w" * 50 + long, "yz")))
    assert cut == other
    with pytest.raises(InputError, match="is longer than the 32 of training: score it as a complete text"):
        model.loglikelihood(requests(("a", "b" * 33)))


def test_full_texts_are_scored_in_consecutive_windows(model, trained_model):
    length = model.max_length
    actual = model.loglikelihood_rolling(requests(*((text,) for text in [*TEXTS, ""])))
    for text, log_likelihood in zip(TEXTS, actual, strict=False):
        ids = [trained_model.tokenizer.begin, *trained_model.tokenizer.encode([text])[0].tolist()]
        starts = range(0, len(ids) - 1, length)
        expected = sum(compute_log_probs(trained_model, ids[start : start + length + 1])[0].sum() for start in starts)
        assert log_likelihood == pytest.approx(expected, abs=2e-3)
    assert actual[-1] == 0.0


def test_answers_end_before_the_strings_of_until(model, trained_model):
    contexts = ["the cat", "a", "the dog sees"]
    plain = model.generate_until(requests(*((x, {"max_gen_toks": 8}) for x in contexts)))
    alone = [Generator(trained_model).generate([x], 8, Sampling(temperature=0.0))[0].text for x in contexts]
    assert plain == alone
    word = plain[0][5]
    cut = model.generate_until(requests(*((x, {"max_gen_toks": 8, "until": [word, "\0"]}) for x in contexts)))
    assert cut == [text.split(word)[0] for text in plain]
    sampled = requests(*((x, {"max_gen_toks": 8, "do_sample": True, "temperature": 1.0}) for x in contexts))
    assert model.generate_until(sampled) == model.generate_until(sampled) != [text[:8] for text in plain]
    same = requests(*((x, {"max_new_tokens": 8, "num_beams": 1}) for x in contexts))
    assert model.generate_until(same) == plain
    for unknown in ({"beams": 3}, {"num_beams": 3}):
        with pytest.raises(InputError, match=f"generation_kwargs has {next(iter(unknown))}: known are until"):
            model.generate_until(requests(("a", unknown)))


@pytest.fixture(scope="module")
def run(tmp_path_factory, usual_promotion):
    folder = tmp_path_factory.mktemp("run")
    config = small_config(write_corpus(folder / "text"), folder / "cache", "flash")
    config.model.max_length = 64
    config.data.update(pack="documents", tokenizer="bytes", length=64, tokens_per_batch=8 * 64)
    config.train.update(steps=2, warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0)
    train(config, folder / "run")
    return folder / "run"


@pytest.mark.slow("scores a split twice")
def test_bits_per_byte_equal_those_of_evaluate(run, tmp_path):
    """Evaluate also counts the end of each document; without it the scores are equal, window by window."""
    trained_model = flash_lm.load(run)
    (ours,) = evaluate(run, "test")
    texts = documents(load_corpus(trained_model.config.data), "test")
    model, nll = HarnessModel(trained_model), 0.0
    for text in texts:
        ids = [
            trained_model.tokenizer.begin,
            *trained_model.tokenizer.encode([text])[0].tolist(),
            trained_model.tokenizer.end,
        ]
        start = (len(ids) - 2) // model.max_length * model.max_length
        nll -= compute_log_probs(trained_model, ids[start:])[0][-1]
    nll -= sum(model.loglikelihood_rolling(requests(*((text,) for text in texts))))
    assert ours["nll"] == pytest.approx(nll, rel=1e-5)
    assert ours["bits_per_byte"] == pytest.approx(nll / math.log(2) / sum(len(x.encode()) for x in texts), rel=1e-5)


@pytest.mark.slow("starts a process that runs three tasks")
def test_the_command_runs_the_tasks_offline(run, tmp_path):
    words = [f"--workdir={run}", f"--include={ROOT}/configs/harness", f"--results={tmp_path}/out.jsonl"]
    out, _ = finish(command("flash_lm.harness", *words, "--tasks=own_text,minimal_pairs,next_words"))
    assert "bits_per_byte" in out and "exact_match" in out
    lines = {line["task"]: line for line in read_jsonl(tmp_path / "out.jsonl")}
    assert [lines[x]["questions"] for x in ("own_text", "minimal_pairs", "next_words")] == [4, 10, 5]
    texts = [line["text"] for line in read_jsonl(ROOT / "configs" / "harness" / "texts.jsonl")]
    nll = -sum(HarnessModel(load_model(run)).loglikelihood_rolling(requests(*((text,) for text in texts))))
    size = sum(len(text.encode()) for text in texts)
    assert lines["own_text"]["bits_per_byte"] == pytest.approx(nll / math.log(2) / size, rel=1e-5)
    assert 0 <= lines["minimal_pairs"]["acc"] <= 1 and lines["next_words"]["exact_match"] == 0


def test_bad_tasks_are_reported(run, tmp_path, monkeypatch, capsys):
    from flash_lm import harness  # noqa: PLC0415

    monkeypatch.chdir(ROOT)
    with pytest.raises(InputError, match="there is no task nothing; known are minimal_pairs, next_words, own_text"):
        harness.main([f"--workdir={run}", "--tasks=nothing"])
    with pytest.raises(InputError, match="is no folder: give the one that has your YAML files"):
        harness.main([f"--workdir={run}", "--tasks=own_text", f"--include={tmp_path}/none"])
    task = (ROOT / "configs" / "harness" / "own_text.yaml").read_text()
    for change, message in (
        (("texts.jsonl", "none.jsonl"), "Unable to find"),
        (("{{text}}", "{{txt}}"), "'txt' is undef"),
    ):
        (tmp_path / "own_text.yaml").write_text(task.replace(*change))
        with pytest.raises(InputError, match=f"--tasks=own_text: .*{message}.*: look at the task's YAML file"):
            harness.main([f"--workdir={run}", "--tasks=own_text", f"--include={tmp_path}"])


@pytest.mark.slow("starts a service")
def test_the_service_and_the_adapter_give_equal_results():
    with service("text") as text:
        _compare(text)


def _compare(text):
    url = f"{text.server.url}/v1/completions"
    remote = LocalCompletionsAPI(base_url=url, model="a_text_run", max_length=60, max_retries=1, batch_size=3)
    adapter = HarnessModel(random_model("text"))
    make = lambda kind, *requests: [Instance(kind, {}, one, i) for i, one in enumerate(requests)]
    pairs = make("loglikelihood", ("a tree", " and a house"), ("", "naïve"), ("def f(", "x)"), ("猫", "é"))
    for local, served in zip(adapter.loglikelihood(pairs), remote.loglikelihood(pairs), strict=True):
        assert served[0] == pytest.approx(local[0], abs=1e-3) and served[1] == local[1]
    (greedy,) = adapter.generate_until(make("generate_until", ("def ", {"until": ["\n\n"], "max_gen_toks": 3})))
    (certain,) = remote.loglikelihood(make("loglikelihood", ("def ", greedy)))
    assert certain[1] is (adapter.loglikelihood(make("loglikelihood", ("def ", greedy)))[0][1])
    asked = make("generate_until", *((x, {"until": ["e"], "max_gen_toks": 20}) for x in ("def ", "a tree", "猫")))
    assert remote.generate_until(asked) == adapter.generate_until(asked)
    texts = make("loglikelihood_rolling", ("a tree and a house",), ("naïve",))
    rolling = [x if isinstance(x, float) else x[0] for x in remote.loglikelihood_rolling(texts)]
    assert rolling == pytest.approx(adapter.loglikelihood_rolling(texts), abs=1e-3)
