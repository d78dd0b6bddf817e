"""The Sphinx extensions of the site: tables of results, docstrings, links."""

import sys

import pytest
from small import ROOT

pytest.importorskip("sphinx", reason="the site's packages are not installed")
sys.path.append(str(ROOT / "docs" / "_extensions"))

import docstrings
import repository
import results

LINES = [
    {"family": "a", "length": 512, "ms": 1234.5, "bytes": 2_000_000},
    {"family": "a", "length": 1024, "ms": 2000.0, "bytes": 3_000_000},
    {"family": "b", "length": 1024, "ms": 10.0, "bytes": None},
]


def test_a_cell_is_written_in_its_unit():
    assert results.format_cell("{ms/1000:.2f} s of `{family}`", LINES[0]) == "1.23 s of `a`"
    assert results.format_cell("{bytes/1e6:.1f}", LINES[2]) == ""
    assert results.format_cell("{none}", LINES[0]) == ""


def test_a_table_has_one_row_per_line_or_one_column_per_value():
    columns = {"family": "`{family}`", "ms": "{ms:.0f}"}
    assert results.table(LINES[:1], columns, None) == [["family", "ms"], ["`a`", "1234"]]
    columns = {"family": "`{family}`", "*": "{ms:.0f}", "MB": "{bytes/1e6:.0f}"}
    across = results.table(LINES, columns, "length")
    assert across == [["family", "512", "1,024", "MB"], ["`a`", "1234", "2000", "2"], ["`b`", "", "10", ""]]
    assert results.table(LINES[::-1], columns, "length")[0] == across[0]  # numbers ascend in any order of the lines


def test_columns_of_words_are_aligned_left():
    sides = {
        form: results._is_text(form, LINES) for form in ("`{family}`", "{ms:.0f}", "{family} of {length}", "{none}", "")
    }
    assert sides == {"`{family}`": True, "{ms:.0f}": False, "{family} of {length}": False, "{none}": True, "": False}


def test_lines_are_chosen_by_their_values():
    assert len(results.read("studies/families/results/causal/results.jsonl", "family=flash, split=validation")) == 1
    with pytest.raises(Exception, match="has no line with family=flush"):
        results.read("studies/families/results/causal/results.jsonl", "family=flush")


def test_links_become_those_of_the_site():
    assert repository.site_link("docs/keys.md", "..") == "keys.md"
    assert repository.site_link("CLAIMS.md", "../studies/claims") == "claims.md"
    assert repository.site_link("../studies/seq2seq/README.md") == "prefixes.md"
    assert repository.site_link("../README.md", "../studies/quickstart") == "studies.md"
    assert repository.site_link("../studies/lra/results/table.md") == "path:../studies/lra/results/table.md"
    assert repository.site_link("config.py", "../studies/carry") == "../studies/carry/config.py"
    assert (
        repository.with_site_links("[a](https://b.c) [d](#e) [f](keys.md#g)")
        == "[a](https://b.c) [d](#e) [f](keys.md#g)"
    )


def test_links_of_a_family_become_those_of_the_including_page():
    """On GitHub they lead to the README, on the site to the page that shows it."""
    links = "[how](../../benchmarks/peers/README.md#which-is-faster), [a\nstudy](../../studies/quality/README.md)"
    assert repository.with_site_links(links, "families") == "[how](peers.md#which-is-faster), [a\nstudy](study.md)"
    assert repository.with_site_links("[export](../export.md), ![p](pictures/flash.svg)", "families") == (
        "[export](export.md), ![p](families/pictures/flash.svg)"
    )


def test_each_study_has_a_page_with_its_name():
    readmes = [*(ROOT / "studies").glob("**/README.md"), *(ROOT / "benchmarks").glob("**/README.md")]
    listed = (ROOT / "docs" / "index.md").read_text().splitlines()
    for readme in (path for path in readmes if path.parent.name != "results"):
        page = ROOT / "docs" / repository.PAGES[f"../{readme.relative_to(ROOT)}"]
        heading = page.read_text().splitlines()[0]
        assert heading == readme.read_text().splitlines()[0] and page.stem in listed


def test_docstrings_become_restructuredtext():
    lines = ["All `Array`s *must* be a_ thing:", "", "    x = `y`", "", "Args:", "    x: `y`.", ""]
    assert docstrings.to_rst([*lines, "Example:", "    >>> 2 ** 3 | x_", "    8"]) == [
        "All ``Array``\\ s \\*must\\* be a\\_ thing:",
        "",
        "::",
        "",
        "    x = `y`",
        "",
        "Args:",
        "    x: ``y``.",
        "",
        "Example:",
        "    >>> 2 ** 3 | x_",
        "    8",
    ]
