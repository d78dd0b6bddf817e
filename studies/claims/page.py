"""Writes CLAIMS.md: each claim with its verdict, rule, result, and the commands that produce the evidence."""

import pathlib
import string
import tomllib
from typing import Any

from flash_lm.report.ratios import SEEDS
from flash_lm.runs.jsonl import Line, read_lines, write_jsonl
from flash_lm.sweeps.jobs import read_job_lines
from studies.claims.collect import group_runs
from studies.claims.evidence import Evidence
from studies.claims.report import Claim, read_claim
from studies.protocol.verdict import ALIKE, ARITHMETIC, WORDS, Verdict

HERE = pathlib.Path(__file__).parent
ROOT, TABLE = HERE.parents[1], HERE / "claims.toml"
RESULTS = pathlib.PurePath("studies", "claims", "results")
RUNS, CURVES, VERDICTS = "runs.jsonl", "curves.jsonl", "verdicts.jsonl"
INTRODUCTION = f"""\
A ratio is decided by its geometric mean over {SEEDS} seeds or more. The claim holds if the 95 % interval of the mean
(Student's t) is inside the bounds. It does not hold if the interval is outside. Otherwise it is undecided. In the
quality study (README.md in studies/quality) the interval includes the error of the test text and, at equal time, the
error of the step times, as well as the spread of the seeds. Where a rule says "by the seeds alone", the result lines
have no blocks of text, so the error of the text is not known. Accuracies and measurements need two seeds, or two runs
of a benchmark, and all of them must agree. A claim is also undecided if it was scored only on the validation split,
because choices were made on that split. Verdicts are about the test split. Perplexities within a factor of {ALIKE:g}
of each other count as equal. "As good as" means no worse than that factor, and "better" means better by more. A rule
may name another factor. A measured value is shown with the claimed one ("237 of 317"). The models are small and their
training is short. A claim that holds here may fail for the papers' models, and a claim that fails here may hold for
them."""


def read_table() -> tuple[dict[str, Any], list[Claim]]:
    """Reads claims.toml; returns the table, and its claims with their commands."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return table, [read_claim(row, _commands(row, table)) for row in table["claims"]]


def _commands(row: dict[str, Any], table: dict[str, Any]) -> list[str]:
    """Returns the commands that produce a claim's evidence: the sweeps of its studies, then those that it names."""
    studies = dict.fromkeys(part["study"] for part in row["rules"] if "study" in part)
    sweeps = [
        f"`{table['studies'][study]['command']}`, then "
        f"`python -m studies.claims --study={study} --workdir=runs/{study}`"
        for study in studies
    ]
    return sweeps + [f"`{table['commands'][name]}`" for name in row.get("commands", ())] or [ARITHMETIC]


def read_evidence(root: pathlib.Path) -> Evidence:
    """Reads the runs of all sweeps, and the result files that claims name, below the root of the repository."""
    table, claims = read_table()
    studies = {study: group_runs(read_lines(root / RESULTS / study / RUNS)) for study in table["studies"]}
    files = {path for claim in claims for rule in claim.rules for path in getattr(rule, "files", ())}
    files |= {part["times"] for row in table["claims"] for part in row["rules"] if "times" in part}
    return Evidence(
        studies, {path: read_job_lines((root / path).parent, pathlib.Path(path).stem) for path in sorted(files)}
    )


def verdict_lines(evidence: Evidence) -> list[Line]:
    """Returns a line per claim: its text and source, its verdict, the reasons if it is undecided, and its figure."""
    verdicts = [(claim, claim.verdict(evidence)) for claim in read_table()[1]]
    return [
        {
            "claim": x.text,
            "of": x.source,
            "verdict": verdict.word,
            "reasons": verdict.reasons,
            "figure": verdict.figure,
        }
        for x, verdict in verdicts
    ]


def render_page(evidence: Evidence) -> str:
    """Returns the text of CLAIMS.md."""
    table, claims = read_table()
    verdicts = [(claim, claim.verdict(evidence)) for claim in claims]
    counts = {word: sum(verdict.word == word for _, verdict in verdicts) for word in WORDS}
    verdict_counts = ", ".join(f"{word} {count}" for word, count in counts.items() if count)
    # Commands are listed once, by letter.
    commands = dict.fromkeys(command for claim in claims for command in claim.commands)
    letters = {command: string.ascii_uppercase[i] for i, command in enumerate(commands)}
    # Sections by source.
    of_source = {claim.source: [x for x in verdicts if x[0].source == claim.source] for claim in claims}
    sections = [
        "\n\n".join([f"## {source}", *(_render_section(*x, letters) for x in source_verdicts)])
        for source, source_verdicts in of_source.items()
    ]
    return "\n".join(
        [
            "# A verdict on every claim, at small scale",
            "",
            f"Of {len(claims)} claims: {verdict_counts}. Written by `python -m studies.claims` from `claims.toml` and "
            "the files that it names.",
            "",
            INTRODUCTION,
            "",
            "| claim | of | verdict |",
            "|---|---|---|",
            *(f"| {claim.text} | {claim.source} | {verdict.word} |" for claim, verdict in verdicts),
            "",
            *(f"{section}\n" for section in sections),
            "## The studies",
            "",
            *(_describe_study(study, facts["what"], evidence) for study, facts in table["studies"].items()),
            "",
            "## The commands",
            "",
            *(f"- {letter}: {command}" for command, letter in letters.items()),
        ]
    )


def _render_section(claim: Claim, verdict: Verdict, letters: dict[str, str]) -> str:
    """Returns the section of a claim; `letters` names the commands."""
    facts = {
        "rule": "; ".join(filter(None, (rule.text for rule in claim.rules))),
        "result": verdict.figure,
        "models": verdict.size,
        "what would change it": claim.change,
        "made by": ", ".join(letters[command] for command in claim.commands),
    }
    lines = [f"- {name}: {fact}" for name, fact in facts.items() if fact]
    return "\n".join(
        [
            f"### {claim.text}",
            "",
            ": ".join(filter(None, [f"**{verdict.word}**", "; ".join(verdict.reasons)])),
            "",
            *lines,
        ]
    )


def _describe_study(study: str, what: str, evidence: Evidence) -> str:
    """Returns a list item with a study's size, computed from its lines."""
    runs = [run for by_seed in evidence.studies[study].values() for run in by_seed.values()]
    lines = [line for run in runs for line in run.scores.values()]
    if not lines:
        return f"- **{study}**: {what}. Not run yet."
    values = lambda key: sorted({line[key] for line in lines if key in line})
    span = lambda key: " to ".join(f"{x:,.0f}" for x in dict.fromkeys((values(key)[0], values(key)[-1])))
    per_step = f" of {span('batch_tokens')} tokens" if values("batch_tokens") else ""
    dirty = " (changed)" if any(line.get("trained_dirty") for line in lines) else ""
    seeds, splits, corpora, commits = (
        ", ".join(map(str, values(x))) for x in ("seed", "split", "corpus", "trained_git")
    )
    return (
        f"- **{study}**: {what}. {len(evidence.studies[study])} kinds of runs, seeds {seeds}; {span('parameters')} "
        f"parameters, {span('step')} steps{per_step}; scored on the {splits} split of {corpora}, {span('tokens')} "
        f"tokens; trained by commit {commits or 'not recorded'}{dirty}."
    )


def write_claims(root: pathlib.Path) -> str:
    """Writes CLAIMS.md and verdicts.jsonl below the root of the repository; returns the text of CLAIMS.md."""
    evidence = read_evidence(root)
    text, folder = render_page(evidence), root / RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / VERDICTS, verdict_lines(evidence))
    (folder.parent / "CLAIMS.md").write_text(f"{text}\n", encoding="utf-8")
    return text
