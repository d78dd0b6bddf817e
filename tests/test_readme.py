"""The figures in README and the site against the files that they link; and each file against its command.

Tables of the site are built from the files, and cannot differ from them.
"""

import json
import re

import pytest
from small import ROOT

README = (ROOT / "README.md").read_text()
QUOTED = {page.name: page.read_text() for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
COMMANDS = (ROOT / "results" / "README.md").read_text()


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "results" / path).read_text().splitlines()]


def one(path: str, **where) -> dict:
    (line,) = [line for line in lines(path) if where.items() <= line.items()]
    return line


def typed(page: str) -> list[tuple[str, str]]:
    """Figures with the file that they link."""
    return re.findall(r"\[([\d.]+)(?: times)?\]\((?:\.\./)?results/([\w./]+\.jsonl)\)", page)


def speedup(family: str, length: int) -> float:
    return one("performance/step_time/steps.jsonl", family=family, length=length)["speedup"]


def decoding(baseline: str) -> float:
    """Tokens a second of FLASH, times those of the baseline, after 16384 tokens in batches of 16."""
    cell = {"context": 16384, "batch": 16}
    slow, fast = (one("decode_grouped/decode.jsonl", family=name, **cell) for name in (baseline, "flash"))
    return slow["ms_a_token"] / fast["ms_a_token"]


def test_the_figures_of_readme():
    """In their order, each rounded as it is written."""
    families = [one("families/results.jsonl", run=name) for name in ("flash", "flash_quad", "transformer_plus_plus")]
    expected = [
        *((f"{line['perplexity']:.1f}", "families/results.jsonl") for line in families),
        (f"{speedup('flash', 512):.1f}", "performance/step_time/steps.jsonl"),
        (f"{speedup('flash', 8192):.1f}", "performance/step_time/steps.jsonl"),
        (f"{decoding('transformer_plus_plus'):.1f}", "decode_grouped/decode.jsonl"),
        (f"{decoding('transformer_plus_plus+num_kv_heads=2'):.1f}", "decode_grouped/decode.jsonl"),
        (f"{speedup('flash_quad', 8192):.1f}", "performance/step_time/steps.jsonl"),
        (f"{one('performance/sdpa/peers.jsonl', length=4096)['speedup']:.2f}", "performance/sdpa/peers.jsonl"),
    ]
    assert typed(README) == expected
    assert families[0]["perplexity"] == min(line["perplexity"] for line in lines("families/results.jsonl"))
    assert all(speedup("flash_quad", length) < 1.05 for length in (512, 1024, 2048, 4096, 8192))


def test_the_figures_of_the_pages():
    told = " ".join(QUOTED["decoding.md"].split())
    assert f"{decoding('transformer_plus_plus'):.1f} times as many tokens a second" in told
    assert f"and {decoding('transformer_plus_plus+num_kv_heads=2'):.1f} times as many as with two heads" in told
    losses = [line["losses"] for line in lines("mesh/mesh.jsonl")]
    assert all(abs(a / b - 1) < 1e-6 for row in losses for a, b in zip(row, losses[0], strict=True))


def test_the_verdicts():
    """The counts in README are those of the page."""
    page = (ROOT / "results" / "CLAIMS.md").read_text()
    counts = re.search(r"Of (\d+) claims: (.*?)\. Written", page)
    told = " ".join(README.split())
    assert counts and f"Of {counts[1]} claims" in told
    for part in counts[2].split(", "):
        count, word = re.match(r"(\d+) (\w+(?: \w+)*?)(?: at small scale)?$", part).groups()
        assert re.search(rf"\b{count} {word}", told), part


@pytest.mark.parametrize("name", QUOTED)
def test_each_quoted_file_is_there_and_has_a_command(name):
    text, nothing_yet = QUOTED[name], "gpu"  # nobody has had one
    quoted = set(re.findall(r"results/([\w./]+)", text))
    quoted |= set(re.findall(r"\{results-table\} (\S+)", text)) | set(re.findall(r"\{result\}`(\S+)", text))
    for path in quoted - {f"{nothing_yet}/"}:
        path = path.rstrip("./")
        assert list((ROOT / "results").glob(path + "*")), path
        folder = path.split("/")[0]
        assert folder in ("README.md", "CLAIMS.md") or f"`{folder}" in COMMANDS, path


def test_a_command_beside_a_file_makes_that_file():
    """Each row's --out is what the row is of, or lies in it."""
    rows = re.findall(r"^\| `([\w./]+)`[^|]*\| (.*) \|$", COMMANDS, re.MULTILINE)
    assert len(rows) > 20
    for path, command in rows:
        outs = re.findall(r"--out=([\w./]+)", command)
        file = f"results/{path.rstrip('/')}"
        assert all(out.startswith(file) or file.startswith(f"{out}/") for out in outs), path
        assert (ROOT / "results" / path).exists(), path
