"""README's figures against the files that they are quoted from, and each quoted file against its command."""

import json
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
COMMANDS = (ROOT / "results" / "README.md").read_text()
FAMILIES = {
    "FLASH": "flash",
    "FLASH-Quad": "flash_quad",
    "MC-TFM": "mc_tfm",
    "AFT-conv": "aft_conv",
    "AFT-simple": "aft_simple",
    "AFT-full": "aft_full",
    "AFT-local": "aft_local",
    "Transformer++": "transformer_plus_plus",
    "Transformer+": "transformer_plus",
    "Transformer": "transformer",
    "Linear Transformer": "linear_transformer",
    "Linear": "linear_transformer",
    "Performer": "performer",
}


def lines(path: str) -> list[dict]:
    return [json.loads(line) for line in (ROOT / "results" / path).read_text().splitlines()]


def table(heading: str) -> list[dict[str, str]]:
    """The rows of the table with this first line, by column."""
    text = README[README.index(heading) :].split("\n\n")[0].splitlines()
    names, _, *rows = ([cell.strip() for cell in row.strip("|").split("|")] for row in text)
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_the_families():
    found = {line["run"]: line for line in lines("families/results.jsonl")}
    rows = table("| family | validation perplexity |")
    assert {FAMILIES[row["family"]] for row in rows} == set(found)
    for row in rows:
        line = found[FAMILIES[row["family"]]]
        assert line["split"] == "validation" and row["validation perplexity"] == f"{line['perplexity']:.1f}"
        assert row["ms a step"] == f"{line['microbatch_ms']:.0f}"
        assert row["times as fast as Transformer++"] == f"{line['speedup']:.2f}"
    sizes = sorted((line["parameters"], name) for name, line in found.items())
    words = re.search(r"\(([\d.]+)–([\d.]+)M parameters, AFT-full and AFT-local ([\d.]+)M", README)
    assert words and {name for _, name in sizes[-2:]} == {"aft_full", "aft_local"}
    assert words.groups() == tuple(f"{sizes[i][0] / 1e6:.2f}" for i in (0, -3, -1))
    assert sizes[-3][0] / sizes[0][0] < 1.06


def test_the_demo():
    found = {line["run"]: line for line in lines("demo/results.jsonl")}
    rows = table("| run                   | family")
    assert {row["run"] for row in rows} == set(found)
    for row in rows:
        line = found[row["run"]]
        assert row["perplexity"] == f"{line['perplexity']:.2f}" and row["steps"] == str(line["step"])
        assert row["bits a byte"] == f"{line['bits_per_byte']:.3f}" and row["parameters"] == f"{line['parameters']:,}"


@pytest.mark.parametrize(
    ("heading", "path"),
    [
        ("| rows of | Transformer++ | FLASH-Quad | FLOPs", "performance/step_time/steps.jsonl"),
        ("| rows of | Transformer++ | FLASH-Quad | FLASH | MC-TFM |", "step_time/steps.jsonl"),
    ],
)
def test_the_step_times(heading, path):
    found = {(line["family"], line["length"]): line for line in lines(path)}
    for row in table(heading):
        length = int(row.pop("rows of").split()[0])
        for name, told in row.items():
            if name in FAMILIES:
                line = found[FAMILIES[name], length]
                ratio = "" if name == "Transformer++" else f" ({line['speedup']:.1f}×)"
                assert told == f"{line['median_ms'] / 1000:.1f}{ratio}", (name, length)


def test_what_a_step_sends():
    told = re.search(r"What a training step of the small FLASH sends.*?\n\n", README, re.DOTALL)
    assert told
    text = " ".join(told[0].split())
    for line in lines("mesh/mesh.jsonl"):
        assert line["family"] == "flash" and not line["dirty"]
        collectives, megabytes = line["collectives_a_step"], f"{line['collective_bytes_a_step'] / 1e6:.1f}"
        assert re.search(rf"\b{collectives}( collectives)? and {megabytes} MB", text), line["mesh"]


def test_the_verdicts():
    """The counts in README are those of the page."""
    page = (ROOT / "results" / "CLAIMS.md").read_text()
    counts = re.search(r"Of (\d+) claims: (.*?)\. Written", page)
    told = " ".join(README.split())
    assert counts and f"Of {counts[1]} claims" in told
    for part in counts[2].split(", "):
        count, word = re.match(r"(\d+) (\w+(?: \w+)*?)(?: at small scale)?$", part).groups()
        assert re.search(rf"\b{count} {word}", told), part


def test_each_quoted_file_is_there_and_has_a_command():
    nothing_yet = "gpu"  # nobody has had one
    for path in set(re.findall(r"results/([\w./]+)", README)) - {f"{nothing_yet}/"}:
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
