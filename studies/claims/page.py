"""The page of claims, CLAIMS.md: each claim with its verdict, the rule, what was found, and the commands behind it."""

import pathlib
import string
import tomllib
from typing import Any

from flash_lm.runs.jsonl import Line, read_lines, write_jsonl
from studies.claims.collect import gather
from studies.claims.evidence import Evidence
from studies.claims.report import Claim, read_claim
from studies.protocol.jobs import read_job_lines
from studies.protocol.ratios import SEEDS
from studies.protocol.verdict import ALIKE, ARITHMETIC, WORDS, Verdict

HERE = pathlib.Path(__file__).parent
ROOT, TABLE = HERE.parents[1], HERE / "claims.toml"
RESULTS = pathlib.PurePath("studies", "claims", "results")
RUNS, CURVES, VERDICTS = "runs.jsonl", "curves.jsonl", "verdicts.jsonl"
INTRODUCTION = f"""\
A ratio is decided by its geometric mean over {SEEDS} seeds or more: the claim holds if the 95 % interval of the
mean (Student's t) is wholly within the bounds, does not hold if it is wholly outside, and else is undecided. In the
study of quality (README.md in studies/quality) the interval has the error of the text beside the spread of the seeds,
and at equal time that of the times. Where a rule says "by the seeds alone", the lines have no blocks of text, so that
error is not known. Accuracies and what is measured need two seeds, or two runs of a benchmark, and all of them must
agree. A claim that was scored only on the validation split, on which choices were made, is undecided too: verdicts are
of the test split. Perplexities within a factor of {ALIKE:g} of each other count as equal. "As good as" means no worse
than that factor, and "better" means better by more; a rule may name another factor. What is measured stands beside
what is claimed ("237 of 317"). What holds after so few steps of such small models may not hold for those of the
papers, and what fails here may hold there."""


def read_table() -> tuple[dict[str, Any], list[Claim]]:
    """The table, and its claims with the commands behind them."""
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return table, [read_claim(row, _commands(row, table)) for row in table["claims"]]


def _commands(row: dict[str, Any], table: dict[str, Any]) -> list[str]:
    """The commands that produce a claim's evidence: the sweeps of its studies, and its own commands."""
    studies = dict.fromkeys(part["study"] for part in row["rules"] if "study" in part)
    sweeps = [
        f"`{table['studies'][study]['command']}`, then `python -m studies.claims --study={study} --runs=runs/{study}`"
        for study in studies
    ]
    return sweeps + [f"`{table['commands'][name]}`" for name in row.get("commands", ())] or [ARITHMETIC]


def read_evidence(root: pathlib.Path) -> Evidence:
    """The runs of all sweeps, and the lines of the files that claims name, below the root of the repository."""
    table, claims = read_table()
    studies = {study: gather(read_lines(root / RESULTS / study / RUNS)) for study in table["studies"]}
    files = {path for claim in claims for rule in claim.rules for path in getattr(rule, "files", ())}
    files |= {part["times"] for row in table["claims"] for part in row["rules"] if "times" in part}
    return Evidence(
        studies, {path: read_job_lines((root / path).parent, pathlib.Path(path).stem) for path in sorted(files)}
    )


def verdict_lines(evidence: Evidence) -> list[Line]:
    """A line for each claim: its text and source, the word of its verdict, why none is given, and what was found."""
    found = [(claim, claim.verdict(evidence)) for claim in read_table()[1]]
    return [
        {
            "claim": x.text,
            "of": x.source,
            "verdict": own.word,
            "reasons": own.reasons,
            "figure": own.figure,
        }
        for x, own in found
    ]


def page(evidence: Evidence) -> str:
    """The page in Markdown."""
    table, claims = read_table()
    verdicts = [(claim, claim.verdict(evidence)) for claim in claims]
    counts = {word: sum(verdict.word == word for _, verdict in verdicts) for word in WORDS}
    found = ", ".join(f"{word} {count}" for word, count in counts.items() if count)
    commands = dict.fromkeys(command for claim in claims for command in claim.commands)
    letters = {command: string.ascii_uppercase[i] for i, command in enumerate(commands)}
    of_source = {claim.source: [x for x in verdicts if x[0].source == claim.source] for claim in claims}
    sections = [
        "\n\n".join([f"## {source}", *(_section(*x, letters) for x in own)]) for source, own in of_source.items()
    ]
    return "\n".join(
        [
            "# A verdict on every claim, at small scale",
            "",
            f"Of {len(claims)} claims: {found}. Written by `python -m studies.claims` from `claims.toml` and the files "
            "that it names.",
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
            *(_described(study, facts["what"], evidence) for study, facts in table["studies"].items()),
            "",
            "## The commands",
            "",
            *(f"- {letter}: {command}" for command, letter in letters.items()),
        ]
    )


def _section(claim: Claim, verdict: Verdict, letters: dict[str, str]) -> str:
    facts = {
        "rule": "; ".join(filter(None, (rule.text for rule in claim.rules))),
        "found": verdict.figure,
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


def _described(study: str, what: str, evidence: Evidence) -> str:
    """A study's size, according to its lines."""
    runs = [run for by_seed in evidence.studies[study].values() for run in by_seed.values()]
    lines = [line for run in runs for line in run.scores.values()]
    if not lines:
        return f"- **{study}**: {what}. Not run yet."
    of = lambda key: sorted({line[key] for line in lines if key in line})
    span = lambda key: " to ".join(f"{x:,.0f}" for x in dict.fromkeys((of(key)[0], of(key)[-1])))
    a_step = f" of {span('batch_tokens')} tokens" if of("batch_tokens") else ""
    dirty = " (changed)" if any(line.get("trained_dirty") for line in lines) else ""
    seeds, splits, corpora, commits = (", ".join(map(str, of(x))) for x in ("seed", "split", "corpus", "trained_git"))
    return (
        f"- **{study}**: {what}. {len(evidence.studies[study])} kinds of runs, seeds {seeds}; {span('parameters')} "
        f"parameters, {span('step')} steps{a_step}; scored on the {splits} split of {corpora}, {span('tokens')} "
        f"tokens; trained by commit {commits or 'not recorded'}{dirty}."
    )


def write_claims(root: pathlib.Path) -> str:
    """Writes CLAIMS.md and verdicts.jsonl below the root of the repository; returns the page."""
    evidence = read_evidence(root)
    text, folder = page(evidence), root / RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    write_jsonl(folder / VERDICTS, verdict_lines(evidence))
    (folder.parent / "CLAIMS.md").write_text(f"{text}\n", encoding="utf-8")
    return text
