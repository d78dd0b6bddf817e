"""Jobs of the controls, by what they tell per hour; the README.md of this folder gives the reasons."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from flash_lm.config.changes import apply_changes
from flash_lm.runs.jsonl import Line
from flash_lm.sweeps.jobs import Job, read_job_lines
from studies.controls import anchor, recall
from studies.controls.language import Candidate, Text, jobs, lines_at_best_rates
from studies.quality import config as study
from studies.quality.run import POSITIONS, Part
from studies.quality.step_times import time_parts

NAME = "controls"
_TAKEN = {"transformer_plus_plus": 0.006, "flash_scores": 0.012}  # rates in the quality study, three seeds each
LAST_HALF = "1024–2047"  # positions at sequence length 2048
GAIN = 1.02  # least factor in perplexity that tokens farther than 512 must gain

_T, _F = study.MODELS["transformer_plus_plus"], study.MODELS["flash_scores"]
_Q = study.MODELS["flash_quad"] | {"model.max_length": 512}  # so that its bias is the Toeplitz bias, as published
_UNTIED = {"model.tie_embeddings": False}
_NO_BIAS = {"model.gau.relative_bias": "none"}
_LOW, _HIGH = (0.003, 0.0042, 0.006), (0.006, 0.0085, 0.012)
_CHUNKS = {
    "flash_scores": {},
    "flash_scores/local": {"model.chunks.global_attention": False},
    "flash_scores/global": {"model.chunks.local_attention": False},
}


class Data(NamedTuple):
    """The texts of the controls.

    Attributes:
        folder: folder with study/ (see studies/quality/data.py) and shakespeare/.
        known: a hash of the texts; empty where jobs are only listed.
    """

    folder: pathlib.Path
    texts_hash: str = ""


class Group(NamedTuple):
    """Models of one part that follow each other in the order of jobs."""

    part: Part
    candidates: Sequence[Candidate]
    text: str = "study"


_SLICES = ("recall", POSITIONS, "parts")
_LONG_ROWS = {"data.length": 2048, "model.max_length": 2048}
_SEEDS = (0, 1, 2)
ROWS = Part("rows_of_512", {}, {}, _SEEDS, 3200, shares=(0.25, 0.5, 1.0), lengths=(2048,), slices=_SLICES)
CHUNKS = Part("chunks_512", {}, {}, _SEEDS, 980, slices=(POSITIONS,))
FAR_BOOKS = Part("far_books", {}, _LONG_ROWS, _SEEDS, 1220, lengths=(512,), slices=(POSITIONS,))
FAR_BIGRAMS = Part("far_bigrams", {}, _LONG_ROWS, range(5), 600, lengths=(512,), slices=(POSITIONS,))
SMALL = Part("small", {}, {"model.model_dim": 64}, _SEEDS, 3200, shares=(0.25, 0.5, 1.0), slices=_SLICES)
DOUBLE = Part("double", {}, {}, _SEEDS, 6400)
LARGE = Part("large", {}, {"model.model_dim": 256, "model.num_layers": 5}, (0,), 6400)

SOFTMAX = Candidate("transformer_plus_plus", _T, _LOW)
FLASH = Candidate("flash_scores", _F, _HIGH)
_CHUNKED = [Candidate(name, _F | changes, (0.006, 0.012)) for name, changes in _CHUNKS.items()]
_flash_variant = lambda name, changes: Candidate(f"flash_scores/{name}", _F | changes, _HIGH)
_slower = lambda candidates, factor: [x._replace(slower=factor) for x in candidates]
_PLAIN = {"model.absolute_positions": "none", "model.rotary": True}  # positions of Transformer+
FAR = {"far_books": FAR_BOOKS, "far_bigrams": FAR_BIGRAMS}

FIRST = [
    Group(ROWS, [SOFTMAX]),
    Group(ROWS, [FLASH]),
    Group(CHUNKS, _CHUNKED),
    Group(ROWS, [Candidate("transformer_plus_plus/convolution", _T | {"model.short_convolution": 3}, _LOW)]),
    Group(ROWS, [_flash_variant("no_bias", _NO_BIAS)]),
]
THEN = [
    Group(ROWS, [Candidate("flash_quad_toeplitz_scores", _Q | {"model.divides": "scores"}, _LOW)]),
    Group(ROWS, [Candidate("transformer", study.MODELS["transformer"], _LOW)]),
    Group(ROWS, [Candidate("linear_transformer_rotary", {"model.family": "linear_transformer"} | _PLAIN, _LOW)]),
    Group(ROWS, [Candidate("transformer_plus", study.MODELS["transformer_plus"], _LOW)]),
    Group(ROWS, [Candidate("transformer_plus_plus/untied", _T | _UNTIED, _LOW), _flash_variant("untied", _UNTIED)]),
    Group(ROWS, [Candidate("flash_quad_toeplitz", _Q | {"model.divides": "weights"}, _LOW)]),
]
LAST = [
    Group(SMALL, _slower([SOFTMAX, FLASH._replace(changes=_F | {"model.gau.expanded_dim": 104})], 0.6)),
    Group(DOUBLE, [SOFTMAX._replace(rates=(0.003, 0.0042)), FLASH._replace(rates=(0.006, 0.0085))]),
    Group(LARGE, _slower([SOFTMAX, FLASH._replace(changes=_F | {"model.gau.expanded_dim": 496})], 3.3)),
]


def folders(root: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the folders of results of the controls and of the quality study, below the root of the repository."""
    return root / "studies" / NAME / "results", root / "studies" / "quality" / "results"


def read_counted_lines(controls: pathlib.Path, quality: pathlib.Path) -> list[Line]:
    """Reads the lines of the controls, and those of the quality study that count here, too, from both folders."""
    older = [line for line in read_job_lines(quality) if _TAKEN.get(line["run"]) == line.get("rate")]
    return [line for line in older if line["part"] == ROWS.name] + read_job_lines(controls)


def jobs_now(data: Data, lines: Sequence[Line]) -> list[Job]:
    """Lists all jobs known so far, in order; those on far tokens follow when their text is known."""
    in_order = lambda groups: [job for group in groups for job in _jobs(group, data, lines)]
    shakespeare = data.folder / "shakespeare"
    return [
        *anchor.jobs(shakespeare, data.texts_hash, (0,)),
        *_search_jobs(data, lines),
        *in_order(FIRST),
        *_far_jobs(data, lines),
        *in_order(THEN),
        *recall.jobs(),
        *in_order(LAST),
        *anchor.jobs(shakespeare, data.texts_hash, (1, 2)),
    ]


def jobs_ever(data: Data) -> list[Job]:
    """Lists jobs of every model that the controls may train, for either text of far tokens."""
    far = [job for name in FAR for job in _jobs(_far_group(name), data, [])]
    softmax = [_jobs(Group(part, [_softmax_in_rows_of_2048(part)], name), data, []) for name, part in FAR.items()]
    return [*jobs_now(data, []), *far, *(job for part_jobs in softmax for job in part_jobs)]


def groups(lines: Sequence[Line]) -> list[Group]:
    """Returns the models of each part, also those of jobs that are too long for the queue."""
    name = far_text(lines)
    return [*FIRST, *([_far_group(name)] if name else []), *THEN, *LAST]


def time_steps(data: Data, controls: pathlib.Path, quality: pathlib.Path, rounds: int) -> list[Line]:
    """Times the steps of the models of sequence length 512 that have lines, into step_times.jsonl."""
    config = apply_changes(study.get_config(), _text("study", data).data)
    models = {x.name: x.changes for group in groups([]) if group.part is ROWS for x in group.candidates}
    lines, file = read_counted_lines(controls, quality), controls / "step_times.jsonl"
    return time_parts(config, [ROWS._replace(models=models)], lines, rounds, file)


def gain(lines: Sequence[Line], part: str) -> float | None:
    """Returns what a Transformer++ gains from far tokens: perplexity after at most 511 tokens over after 1024–2047.

    The former is that of the second half of sequences of 512, the latter of the second half of sequences of 2048. Each
    half covers half of the text, evenly spread, so their tokens are equally hard. Seed 0 at its best rate; None: not
    trained yet.
    """
    scores = [x for x in lines_at_best_rates(lines, part, [_softmax_in_rows_of_2048(FAR[part])]) if x["seed"] == 0]
    at = {(x["length"], x["slice"]): x["perplexity"] for x in scores if x.get("slices") == POSITIONS}
    return at[512, "256–511"] / at[2048, LAST_HALF] if at else None


def far_text(lines: Sequence[Line]) -> str | None:
    """Returns the part whose text shows the value of global attention: the first on which softmax gains enough."""
    gains = {part: gain(lines, part) for part in FAR}
    return next((part for part, factor in gains.items() if factor is not None and factor >= GAIN), None)


def _search_jobs(data: Data, lines: Sequence[Line]) -> list[Job]:
    """Lists jobs of the Transformer++ on each text in turn, until one shows a gain from far tokens."""
    jobs_so_far: list[Job] = []
    for part in FAR.values():
        alone = part._replace(seeds=(0,))
        jobs_so_far += _jobs(Group(alone, [_softmax_in_rows_of_2048(part)], part.name), data, lines)
        factor = gain(lines, part.name)
        if factor is None or factor >= GAIN:
            break
    return jobs_so_far


def _far_jobs(data: Data, lines: Sequence[Line]) -> list[Job]:
    """Lists jobs of local attention, global attention and both on the text with a gain from far tokens."""
    name = far_text(lines)
    return _jobs(_far_group(name), data, lines) if name else []


def _far_group(name: str) -> Group:
    slower = {"far_books": 1.1, "far_bigrams": 3.0}  # the test split of the latter is large
    return Group(FAR[name], _slower(_CHUNKED, slower[name]), name)


def _softmax_in_rows_of_2048(part: Part) -> Candidate:
    return SOFTMAX._replace(rates=(0.0042,) if part is FAR_BOOKS else (0.003,), slower=1.4)


def _jobs(group: Group, data: Data, lines: Sequence[Line]) -> list[Job]:
    taken = _TAKEN if group.part.name == ROWS.name else {}
    return jobs(group.part, group.candidates, _text(group.text, data), lines, taken)


def _text(name: str, data: Data) -> Text:
    """Returns the text that a part reads."""
    study_data = data.folder / "study"
    changes = {
        "study": {"data.mixture": study.mixture(study_data)},
        "far_books": {"data.path": str(study_data / "books")},
        "far_bigrams": {"data.corpus": "bigrams", "data.pack": "examples", "data.bigrams.symbols": 48},
    }
    return Text(changes[name], data.texts_hash)
