"""Compares our attention with public implementations: the same weights, the same input, one sublayer.

    make peers
    python -m benchmarks.peers.check --out=benchmarks/peers/results [--families="longformer cosformer"]

The cases, in check.toml, say beforehand whether outputs agree: their largest difference, relative to the largest
output, is at most 1e-4. If they do not agree, the case names the reason, and another case is without that reason. Some
cases compare theirs with itself: does an output change that should not? Other cases are inputs that theirs cannot run.
The command fails if a case has another outcome. Authors' code is read from a checkout of their repository. fetch.py
makes it, and flags such as --cosformer=PATH name another path.
"""

import argparse
import dataclasses
import json
import logging
import pathlib
import subprocess
import tempfile
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import flash_lm
from benchmarks.lib.peers import add_python, check_python
from flash_lm.cli.huge_pages import user_environment
from flash_lm.cli.run import run
from flash_lm.cli.types import split_words
from flash_lm.errors import InputError, RunError
from flash_lm.families.reformer import LSHCore, ReformerAttention
from flash_lm.models.mixer import Mixer
from flash_lm.ops.lsh_attention import hash_buckets
from flash_lm.runs.jsonl import Line, write_jsonl
from flash_lm.runs.provenance import provenance

WORKER = pathlib.Path(__file__).with_name("check_worker.py")
TABLE = pathlib.Path(__file__).with_suffix(".toml")
THRESHOLD = 1e-4
SOURCES = pathlib.Path(".venv-peers/src")
WIDTH, SEED = 64, 0
# family -> repository of its authors, and the commit that is compared
REPOSITORIES: dict[str, tuple[str, str]] = {
    family: (about["repository"], about["commit"])
    for family, about in tomllib.loads(TABLE.read_text(encoding="utf-8")).items()
    if "repository" in about
}
AGREES, DIFFERS, FAILS = "agrees", "differs", "does not run"


@dataclasses.dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
        family: our family.
        part: their class, a key of the worker's PARTS.
        case: the comparison in words.
        expected: AGREES, DIFFERS or FAILS.
        reason: reason of a difference or a failure.
        keys: our config keys, as for `build_mixer`.
        settings: their settings, as for the worker.
        input: distribution of the input, a key of INPUTS.
        scale: factor of the input.
        shape: batch size and sequence length.
        documents: lengths of the documents of each row; the rest of the row is padding. None: one document per row.
        change: a key of CHANGES; theirs is compared with itself where the change should have no effect.
        noise: standard deviation of noise that is added to all weights, so that none is zero or equal for all channels.
        source: section of the table, which says whose code it is.
    """

    family: str
    part: str
    case: str
    expected: str
    reason: str = ""
    keys: dict[str, Any] = dataclasses.field(default_factory=dict)
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    input: str = "normal"
    scale: float = 1.0
    shape: tuple[int, int] = (2, 32)
    documents: list[list[int]] | None = None
    change: str | None = None
    noise: float = 0.0
    source: str = ""

    def segment_ids(self) -> np.ndarray:
        """Returns the segment ids of the documents, B×L."""
        segments_BxL = np.zeros(self.shape, np.int32)
        for row, lengths in zip(segments_BxL, self.documents or [[self.shape[1]]] * self.shape[0], strict=True):
            filled = np.repeat(np.arange(len(lengths), dtype=np.int32) + 1, lengths)
            row[: len(filled)] = filled
        return segments_BxL


def _bucketed_inputs(mixer: Mixer, rng: np.random.Generator, shape: tuple[int, ...], only_first: bool) -> np.ndarray:
    """Draws tokens in which each combination of LSH buckets is equally frequent; or tokens of the first only."""
    sublayer, (rows, length, width) = mixer.sublayer, shape
    assert isinstance(sublayer, ReformerAttention)
    core = sublayer.core
    assert isinstance(core, LSHCore)
    combinations = core.buckets ** (sublayer.heads * core.rounds)
    many_1xNxD = rng.standard_normal((1, 8 * rows * length * combinations, width), np.float32)
    q = sublayer.query(jnp.asarray(many_1xNxD)).reshape(1, -1, sublayer.heads, sublayer.key_width)
    buckets = np.asarray(hash_buckets(jnp.swapaxes(q, 1, 2), core.rotations[...])).reshape(-1, many_1xNxD.shape[1])
    code_N = (core.buckets ** np.arange(len(buckets))) @ buckets
    wanted = [0] if only_first else range(combinations)
    each = length // len(wanted)
    picked = np.stack([np.flatnonzero(code_N == n)[: rows * each].reshape(rows, each) for n in wanted], axis=1)
    return many_1xNxD[0][rng.permuted(picked.reshape(rows, -1), axis=1)]


INPUTS: dict[str, Callable[[Mixer, np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "normal": lambda _, rng, shape: rng.standard_normal(shape, np.float32),
    "each_bucket": lambda *arguments: _bucketed_inputs(*arguments, only_first=False),
    "one_bucket": lambda *arguments: _bucketed_inputs(*arguments, only_first=True),
}


# name -> (the changed input, from the input and another one; the part of an output that should not change)
CHANGES: dict[str, tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], Callable[[np.ndarray], np.ndarray]]] = {
    "nothing": (lambda x, new: x, lambda y: y),
    "later tokens": (lambda x, new: np.concatenate([x[:, :16], new[:, 16:]], axis=1), lambda y: y[:, :16]),
    "other rows": (lambda x, new: np.concatenate([x[:1], 3 * new[1:]]), lambda y: y[:1]),
    "more tokens": (lambda x, new: np.concatenate([x, new], axis=1), lambda y: y[:, :32]),
}


class Prepared(NamedTuple):
    """A case, our weights by their path, and inputs with our outputs: one, or with a change two."""

    case: Case
    weights: dict[str, np.ndarray]
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


def prepare(case: Case) -> Prepared:
    """Draws weights and inputs of a case, and runs ours."""
    mixer = flash_lm.build_mixer(case.family, model_dim=WIDTH, init="lecun", rngs=nnx.Rngs(SEED), **case.keys)
    if case.noise:
        noise_rng = np.random.default_rng(SEED + 1)
        noisy = lambda x: x + case.noise * jnp.asarray(noise_rng.standard_normal(x.shape), x.dtype)
        nnx.update(mixer, jax.tree.map(noisy, nnx.state(mixer, nnx.Param)))
    rng, shape = np.random.default_rng(SEED), (*case.shape, WIDTH)
    draw = lambda: case.scale * INPUTS[case.input](mixer, rng, shape)
    inputs = [draw()]
    if case.change:
        inputs.append(CHANGES[case.change][0](inputs[0], draw()))
    segment_ids = jnp.asarray(case.segment_ids()) if case.documents else None
    apply = nnx.jit(lambda mixer, x_BxLxD: mixer(x_BxLxD, segment_ids))
    # Ours may not be able to run inputs that theirs cannot run.
    outputs = [] if case.expected == FAILS else [np.asarray(apply(mixer, jnp.asarray(x))) for x in inputs]
    state = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(mixer.sublayer)))
    return Prepared(case, {".".join(str(key.key) for key in path): np.asarray(x) for path, x in state}, inputs, outputs)


def ask(python: pathlib.Path, questions: list[Line], arrays: list[dict[str, np.ndarray]]) -> list[Line]:
    """Runs the worker; returns its answers, each with `output`, `error` or `missing`."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        for n, values in enumerate(arrays):
            np.savez(folder / f"{n}.npz", **values)  # type: ignore[arg-type]
        (folder / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
        done = subprocess.run([python, WORKER, folder], env=user_environment(), capture_output=True, text=True)
        if done.returncode:
            raise RunError(f"{WORKER.name}: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
        answers = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
        for n, answer in enumerate(answers):
            if (folder / f"{n}.npy").exists():
                answer["output"] = np.load(folder / f"{n}.npy")
        return answers


def difference(one: np.ndarray, other: np.ndarray) -> float:
    """Returns max |one - other| / max |other|; infinite if it is not finite.

    >>> difference(np.array([1.0, 1.0]), np.array([1.0, 2.0]))
    0.5
    """
    relative = np.abs(one.astype(np.float64) - other).max() / np.abs(other).max()
    return float(relative) if np.isfinite(relative) else float("inf")


def verdict(prepared: Prepared, answers: list[Line]) -> Line:
    """Returns the line of a case, from their answer to each of its inputs."""
    case, ours = prepared.case, prepared.outputs
    line: Line = {key: getattr(case, key) for key in ("family", "part", "case", "expected", "reason", "change")}
    line |= {"peer": answers[0]["version"], "threshold": THRESHOLD}
    if errors := [answer["error"] for answer in answers if "error" in answer]:
        return line | {"outcome": FAILS, "agrees": None, "error": errors[0]}
    theirs = [answer["output"] for answer in answers]
    if case.change:
        unaffected = CHANGES[case.change][1]
        deviation = difference(unaffected(theirs[1]), unaffected(theirs[0]))
        line["our_difference"] = difference(unaffected(ours[1]), unaffected(ours[0]))
    elif ours:
        real_BxL = case.segment_ids() > 0
        deviation = difference(theirs[0][real_BxL], ours[0][real_BxL])
    else:
        return line | {"outcome": "runs", "agrees": None}
    outcome = AGREES if deviation <= THRESHOLD else DIFFERS
    return line | {"outcome": outcome, "agrees": outcome == AGREES, "difference": deviation}


def explain_surprise(line: Line) -> str | None:
    """Returns why a line is not as expected; None: it is."""
    if line["outcome"] != line["expected"]:
        value = line.get("error", line.get("difference"))
        return f"{line['outcome']}{f' ({value})' if value else ''}, expected: {line['expected']}"
    if line.get("our_difference", 0) > THRESHOLD:
        return f"ours changes by {line['our_difference']:.1e}, too"
    return None


def read_cases(path: pathlib.Path, families: list[str] | None) -> list[Case]:
    """Reads the cases of a table.

    A section is named by its family, unless it has a key `family`. Its keys and settings apply to all of its cases.
    """
    table = tomllib.loads(path.read_text(encoding="utf-8"))
    if unknown := [name for name in families or () if name not in table]:
        raise InputError(f"--families={' '.join(unknown)}: must be among {', '.join(table)}")
    cases = []
    for family in families or table:
        about = table[family]
        for values in about["cases"]:
            both = {key: about.get(key, {}) | values.get(key, {}) for key in ("keys", "settings")}
            both["keys"] = _to_tuples(both["keys"])
            shape = tuple(values.get("shape", Case.shape))
            base = {"family": about.get("family", family), "part": about["part"], "source": family}
            cases.append(Case(**(base | values | both | {"shape": shape})))
    return cases


def _to_tuples(x: Any) -> Any:
    """Turns lists into tuples: TOML only has lists, and config.model only tuples."""
    if isinstance(x, dict):
        return {key: _to_tuples(value) for key, value in x.items()}
    return tuple(x) if isinstance(x, list) else x


def checkout(family: str, path: pathlib.Path) -> pathlib.Path | None:
    """Returns the path of the authors' repository after checking its commit; None: no such path."""
    repository, commit = REPOSITORIES[family]
    if not path.exists():
        return None
    done = subprocess.run(["git", "-C", path, "rev-parse", "HEAD"], capture_output=True, text=True)
    if (at := done.stdout.strip()) != commit:
        raise InputError(f"--{family}={path} is at {at or 'no commit'}: check out {commit} of {repository}")
    return path.resolve()


def check(cases: list[Case], python: pathlib.Path, folders: dict[str, pathlib.Path | None]) -> list[Line]:
    """Returns a line per case whose peer is installed, and prints the missing peers.

    Args:
        cases: the cases.
        python: the peers' interpreter.
        folders: folders of the authors' repositories, by family.
    """
    # One question per input; the other libraries answer all of them in one process.
    missing = {family: REPOSITORIES[family][0] for family, folder in folders.items() if folder is None}
    prepared_cases = [prepare(case) for case in cases if case.source not in missing]
    questions, arrays = [], []
    for case, weights, inputs, _ in prepared_cases:
        question: Line = {"part": case.part, "settings": case.settings}
        if folder := folders.get(case.source):
            repository, commit = REPOSITORIES[case.source]
            question |= {"folder": str(folder), "version": f"{repository} {commit[:12]}"}
        real_BxL = case.segment_ids() > 0
        for x_BxLxD in inputs:
            added = [(0, 0), (0, x_BxLxD.shape[1] - real_BxL.shape[1])]
            questions.append(question)
            arrays.append(weights | {"x": x_BxLxD, "real": np.pad(real_BxL, added, constant_values=True)})
    # One line per case, unless its library is not installed.
    lines, answers = [], iter(ask(python, questions, arrays) if questions else [])
    for prepared in prepared_cases:
        case_answers = [next(answers) for _ in prepared.inputs]
        if "missing" in case_answers[0]:
            missing[prepared.case.source] = case_answers[0]["missing"]
        else:
            lines.append(verdict(prepared, case_answers))
    for family, name in missing.items():
        print(f"{family}: {name} is not there: run `make peers`")
    return lines


def main(argv: list[str]) -> None:
    """Writes check.jsonl to OUT; fails where a case is not as expected."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--families", help="separated by spaces; default: all")
    add_python(parser)
    for family, (repository, commit) in REPOSITORIES.items():
        default = SOURCES / repository.split("/")[1]
        text = f"checkout of github.com/{repository} at {commit[:12]}; default: {default}"
        parser.add_argument(f"--{family}", type=pathlib.Path, default=default, help=text)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder to write")
    arguments = parser.parse_args(argv)
    logging.getLogger("flash_lm").setLevel(logging.WARNING)  # hides how each layer is compiled
    check_python(arguments.python)
    # The cases, and the checkouts that they need.
    cases = read_cases(TABLE, split_words(arguments.families) if arguments.families else None)
    asked = {case.source for case in cases}
    folders = {family: checkout(family, getattr(arguments, family)) for family in REPOSITORIES if family in asked}
    about = provenance(jax.devices()[0].device_kind)
    lines = [line | about for line in check(cases, arguments.python, folders)]
    if not lines:
        raise RunError("there is nothing to compare with")
    for line in lines:
        print(f"{line['family']}: {line['case']}: {line['outcome']}, {line.get('difference', line.get('error'))}")
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_jsonl(arguments.out / "check.jsonl", lines)
    if wrong := [f"{line['family']}: {line['case']}: {why}" for line in lines if (why := explain_surprise(line))]:
        raise RunError("\n".join(wrong))


if __name__ == "__main__":
    run(main)
