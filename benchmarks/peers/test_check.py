"""`benchmarks/peers/check.py` with a peer that is NumPy."""

import re
import subprocess

import numpy as np
import pytest

from benchmarks.peers import check, fetch
from flash_lm.errors import InputError, RunError
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")

TABLE = """
[cosformer]
part = "CosformerAttention"
keys = { num_heads = 2, max_length = 16, causal = true }
settings = { longest = 16 }

[[cosformer.cases]]
case = "the same"
expected = "agrees"
shape = [2, 8]

[[cosformer.cases]]
case = "another M"
expected = "differs"
reason = "M"
shape = [2, 8]
settings = { longest = 12 }

[[cosformer.cases]]
case = "padding behind a causal row"
expected = "agrees"
shape = [2, 8]
documents = [[8], [5]]

[[cosformer.cases]]
case = "later tokens"
expected = "agrees"
change = "later tokens"
shape = [1, 20]
keys = { max_length = 20 }
settings = { longest = 20 }

[[cosformer.cases]]
case = "what raises"
expected = "does not run"
shape = [2, 8]
settings = { longest = 0 }

[linformer]
part = "LinformerSelfAttention"

[[linformer.cases]]
case = "not installed"
expected = "agrees"
"""


def cosformer(settings, arrays):
    """Causal, eq. 9–12, with weights for all pairs."""
    x = arrays["x"].astype(np.float64)
    rows, length, width = x.shape
    heads = lambda name: (x @ arrays[f"{name}.kernel"]).reshape(rows, length, 2, -1)
    q, k, v = np.maximum(heads("query"), 0), np.maximum(heads("key"), 0), heads("value")
    distance = np.subtract.outer(np.arange(length), np.arange(length))
    weights = np.einsum("bihk,bjhk->bhij", q, k) * np.tril(np.cos(np.pi / 2 * distance / settings["longest"]))
    mixed = np.einsum("bhij,bjhk->bihk", weights / weights.sum(axis=-1, keepdims=True), v)
    return mixed.reshape(rows, length, width) @ arrays["output.kernel"]


def ask(_, questions, arrays):
    """Answers like the worker."""
    answers = []
    for question, values in zip(questions, arrays, strict=True):
        if question["part"] != "CosformerAttention":
            answers.append({"missing": "linformer"})
        elif not question["settings"]["longest"]:
            answers.append({"version": question["version"], "error": "ZeroDivisionError: no message"})
        else:
            answers.append({"version": question["version"], "output": cosformer(question["settings"], values)})
    return answers


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A table and a worker of this file, and a checkout that is not looked at."""
    file = tmp_path / "cases.toml"
    file.write_text(TABLE)
    monkeypatch.setattr(check, "TABLE", file)
    monkeypatch.setattr(check, "ask", ask)
    monkeypatch.setattr(check, "checkout", lambda family, path: path)
    return file


@pytest.mark.usefixtures("table")
def test_lines_say_what_agrees_and_what_is_not_there(tmp_path, capsys):
    check.main([f"--python={tmp_path}", f"--out={tmp_path / 'out'}"])
    lines = {line["case"]: line for line in read_jsonl(tmp_path / "out" / "check.jsonl")}
    outcomes = {case: (line["outcome"], line["agrees"]) for case, line in lines.items()}
    assert outcomes == {
        "the same": ("agrees", True),
        "another M": ("differs", False),
        "padding behind a causal row": ("agrees", True),
        "later tokens": ("agrees", True),
        "what raises": ("does not run", None),
    }
    assert 0 < lines["the same"]["difference"] < 1e-5 and lines["later tokens"]["our_difference"] == 0
    assert lines["what raises"]["error"].startswith("ZeroDivisionError")
    assert all(line["threshold"] == 1e-4 and line["git"] for line in lines.values())
    assert lines["the same"]["peer"] == "OpenNLPLab/cosFormer 8e12da111e2a"
    assert "linformer: linformer is not there: run `make peers`" in capsys.readouterr().out


def test_a_surprise_is_an_error(table, tmp_path):
    text = TABLE
    for case, before, after in (
        ("the same", "agrees", "does not run"),
        ("another M", "differs", "agrees"),
        ("what raises", "does not run", "differs"),
    ):
        text = text.replace(f'"{case}"\nexpected = "{before}"', f'"{case}"\nexpected = "{after}"')
    table.write_text(text)
    with pytest.raises(RunError) as error:
        check.main([f"--python={tmp_path}", f"--out={tmp_path / 'out'}", "--families=cosformer"])
    first, second, third = str(error.value).splitlines()
    assert first == "cosformer: the same: runs, expected: does not run"
    assert re.fullmatch(r"cosformer: another M: differs \(0\.\d+\), expected: agrees", second)
    assert third == "cosformer: what raises: does not run (ZeroDivisionError: no message), expected: differs"


def test_ours_must_not_change_where_theirs_does_not():
    line = {"outcome": "agrees", "expected": "agrees", "our_difference": 0.5}
    assert check.explain_surprise(line) == "ours changes by 5.0e-01, too" and not check.explain_surprise(
        line | {"our_difference": 0}
    )


def test_an_output_that_is_not_finite_agrees_with_nothing():
    assert check.difference(np.array([np.nan, 1]), np.ones(2)) == float("inf")
    assert check.difference(np.ones(2), np.array([1, 4])) == 0.75


@pytest.mark.usefixtures("table")
def test_nothing_to_compare_with_is_an_error(tmp_path):
    with pytest.raises(RunError, match="nothing to compare"):
        check.main([f"--python={tmp_path}", f"--out={tmp_path / 'out'}", "--families=linformer"])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--families=cosformer x", "=x: must be among"),
        ("--python=/nowhere", "make peers"),
        ("--cosformer=.", "check out 8e12"),
    ],
)
def test_nonsense_ends_before_anything_runs(tmp_path, word, message):
    words = [f"--python={tmp_path}", f"--out={tmp_path / 'out'}"]
    with pytest.raises(InputError, match=message):
        check.main([*words, word])


def test_a_checkout_is_of_the_commit(tmp_path, monkeypatch):
    assert check.checkout("cosformer", tmp_path / "nowhere") is None
    git = ["git", "-C", tmp_path, "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "--quiet"], ["commit", "--quiet", "--allow-empty", "--message=x"]):
        subprocess.run([*git, *words], check=True)
    with pytest.raises(InputError, match=r"is at [0-9a-f]{40}: check out"):
        check.checkout("cosformer", tmp_path)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setitem(check.REPOSITORIES, "cosformer", ("x/y", commit))
    assert check.checkout("cosformer", tmp_path) == tmp_path.resolve()


def test_the_table_is_one_that_the_worker_knows():
    parts = re.findall(r'^    "(\w+)": \(', check.WORKER.read_text(), re.MULTILINE)
    cases = check.read_cases(check.TABLE, None)
    for case in cases:
        assert case.part in parts and case.input in check.INPUTS and case.change in (None, *check.CHANGES)
        assert case.expected in (check.AGREES, check.DIFFERS, check.FAILS)
        assert bool(case.reason) == (case.expected != check.AGREES), case.case
    assert len({(case.family, case.case) for case in cases}) == len(cases)
    agreeing = {case.family for case in cases if case.expected == check.AGREES and not case.change}
    assert agreeing == {case.family for case in cases}


def test_what_cannot_be_cloned_is_named(tmp_path, monkeypatch, capsys):
    """Repositories that can be cloned are at their commits."""
    origin = tmp_path / "x" / "y"
    origin.mkdir(parents=True)
    git = ["git", "-C", origin, "-c", "user.name=x", "-c", "user.email=x"]
    for words in (["init", "--quiet"], *[["commit", "--quiet", "--allow-empty", f"--message={n}"] for n in range(2)]):
        subprocess.run([*git, *words], check=True)
    first = subprocess.run([*git, "rev-parse", "HEAD^"], capture_output=True, text=True, check=True).stdout.strip()
    monkeypatch.setattr(fetch, "TABLE", tmp_path / "cases.toml")
    names = {"x/y": first, "x/nowhere": first}
    tables = [f'[{n}]\nrepository = "{name}"\ncommit = "{commit}"\n' for n, (name, commit) in enumerate(names.items())]
    fetch.TABLE.write_text("[other]\n" + "".join(tables))
    monkeypatch.setattr(fetch, "SOURCES", tmp_path / "src")
    for key, value in {"COUNT": "1", "KEY_0": f"url.{tmp_path}/.insteadOf", "VALUE_0": "https://github.com/"}.items():
        monkeypatch.setenv(f"GIT_CONFIG_{key}", value)
    fetch.main()
    assert capsys.readouterr().out == "not fetched: x/nowhere\n"
    assert (tmp_path / "src" / "y" / ".git" / "HEAD").read_text().strip() == first
