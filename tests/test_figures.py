"""Numbers in README and the pages, against the linked files of results.

The pages have a note at each number on how it is computed (`figures.py`); the ratios of a claim, such as 0.925
(0.914–0.941), are those of studies/claims/CLAIMS.md. Tables that the site builds from the files cannot differ from
them. studies/findings.py writes numbers into README, which are tested next to it.
"""

import json
import pathlib
import re

import pytest
from figures import RATIO, FigureError, check_figure, check_page, holds, results
from small import ROOT, pages

PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in pages()}
CLAIMS = (ROOT / "studies" / "claims" / "CLAIMS.md").read_text()
FOUND = re.compile(rf"of (\w+(?: \([^)]*\))?) ({RATIO.pattern[:-2]}), \d seeds\) × that of (\w+)")
RATIOS = {f"{name} / {base}": f"{ratio})" for name, ratio, base in FOUND.findall(CLAIMS)}


@pytest.mark.parametrize("name", PAGES)
def test_the_numbers_of_a_page_equal_those_of_its_files(name):
    """Each is rounded as it is written; none is without a note."""
    check_page(PAGES[name], RATIOS, str(pathlib.PurePosixPath(name).parent))


def test_the_notes_are_at_visible_numbers():
    """Without the notes no number of a page is left to check; with them the counts of numbers and notes are equal."""
    page, folder = PAGES["studies/claims/README.md"], "studies/claims"
    counts = check_page(page, RATIOS, folder)
    assert counts["ratio"] == len(RATIO.findall(page)) > 0
    with pytest.raises(FigureError, match="has no note that says how it is computed"):
        check_page(re.sub("<!--.*?-->", "", page), RATIOS, folder)


def test_the_first_run_in_readme_equals_its_output():
    """Its lines are those of the file, in their order; … stands for lines left out."""
    (block,) = re.findall(r"^```text\n(\$ .*?)^```$", PAGES["README.md"], re.MULTILINE | re.DOTALL)
    folder = ROOT / "studies" / "quickstart" / "results" / "first_run"
    printed = iter((folder / "output.txt").read_text().splitlines())
    for line in block.splitlines():
        beginning = line.removesuffix("…")  # of a line
        assert not beginning or any(printed_line.startswith(beginning) for printed_line in printed), line
    (score,) = map(json.loads, (folder / "results.jsonl").read_text().splitlines())
    assert not score["dirty"] and not score["trained_dirty"]


def test_the_verdicts():
    """The counts in README equal those of the page of claims."""
    counts = re.search(r"Of (\d+) claims: (.*?)\. Written", CLAIMS)
    text = " ".join(PAGES["README.md"].split())
    assert counts and f"Of {counts[1]} claims" in text
    for part in counts[2].split(", "):
        assert part in text


@pytest.fixture
def file(tmp_path, monkeypatch) -> str:
    """Lines of two models at two lengths, and one without a length."""
    lines = [
        {"family": "a", "length": 8, "ms": 4.0, "ok": True},
        {"family": "a", "length": 16, "ms": 6.0, "ok": True},
        {"family": "b+x=1", "length": 8, "ms": 1.0, "ok": True},
        {"family": "b+x=1", "length": 16, "ms": 12.0, "ok": False},
        {"family": "c", "losses": [1.0, 2.0]},
    ]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr("figures.ROOT", tmp_path)
    return "x.jsonl"


@pytest.mark.parametrize(
    ("written", "note"),
    [
        ("4.0 times", 'ms(family=a) / ms(family="b*") where length=8'),
        ("4 to 12 ms", 'min(ms(family=a)), max(ms(family="b+x=1"))'),
        ("−33.3 %", "100 * (ms(family=a, length=8) / ms(family=a, length=16) - 1)"),
        ("8,000", "1000 * min(keys(ms(family=a) > 3)) where by=length"),
        ("0.50 and 4.00", 'min(ms(family=a) / ms(family="b*")), max(ms(family=a) / ms(family="b*")) where by=length'),
        ("16", "min(length(length > max(length(ms < 5, ok == True)), family=a))"),
        ("after 3 of 4.0M", '"x.jsonl".ms(family=a, length=8)'),
    ],
)
def test_a_figure_is_computed_from_its_note(file, written, note):
    check_figure(written, note, file)
    other = re.sub(r"\d(?=\D*$)", lambda digit: str((int(digit[0]) + 1) % 10), written)
    with pytest.raises(FigureError, match="should be"):
        check_figure(other, note, file)


@pytest.mark.parametrize(
    ("note", "true"),
    [
        ("ms(family=a) > 3 and ok(family=a) == True", True),
        ("ms() > 3", False),
        ("set(family(ms > 3)) == {a, 'b+x=1'}", True),
        ("list(family(ms > 3)) == ['b+x=1', a]", False),
        ("0.9 < ms(family=a) / 4 < 1.6", True),
        ("ms(family=a) < ms(family='b*') where length=(8, 16)", False),
        ("abs(losses(family=c) - losses()) < 1e-6", True),
    ],
)
def test_a_statement_holds_or_does_not(file, note, true):
    assert holds(note, file) == true


@pytest.mark.parametrize(
    ("note", "message"),
    [
        ("ms(family=a", "cannot be read: ms"),
        ("__import__('os').system('ls')", "cannot be read"),
        ("ms.real", "cannot be read: ms.real"),
        ("ms(family=a) ** 2", "cannot be read"),
        ("ms(family=a) where length", "cannot be read: where length"),
        ("ms(family=nobody)", "has no line for"),
        ("seconds(family=a)", "has no line for"),
        ("'y.jsonl'.ms()", "there is no file y.jsonl"),
        ("ms(3)", "selects nothing: 3"),
        ("ms() where by=family", "has several lines with the same family"),
        ("ms(family=a) / ms(family='b*')", "no line in common"),
    ],
)
def test_a_note_that_cannot_be_read_is_refused(file, note, message):
    with pytest.raises(FigureError, match=message):
        list(results(note, file))


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("[4.0 ms](x.jsonl) in all", "4.0 ms.* has no note"),
        ("[4.0 ms](../x.jsonl) <!-- figure: ms(family=a, length=8) -->", "no note"),
        ("[4.0 of 5](x.jsonl)<!-- figure: ms(family=a, length=8) -->", "1 numbers are computed"),
        ("[4.1 ms](x.jsonl)<!-- figure: ms(family=a, length=8) -->", "4.1 should be 4.000"),
        ("so it is<!-- figure in x.jsonl: ms(family=a, length=8) -->", "1 numbers are computed"),
        ("4.0 ms<!-- figure: ms(family=a, length=8) -->", "ms is of no file"),
        ("faster<!-- holds in x.jsonl: ms(family=a) < 5 -->", "does not hold"),
        ("faster<!-- holds in x.jsonl: ms(family=a) -->", "says nothing that holds"),
        ("0.925 (0.914–0.941)", "has no note"),
        ("0.925 (0.914–0.941)<!-- ratio: a / b -->", "should stand behind 0.924"),
    ],
)
def test_a_page_with_another_figure_or_none_is_refused(file, page, message):
    with pytest.raises(FigureError, match=message):
        check_page(page, {"a / b": "0.924 (0.914–0.941)"})
