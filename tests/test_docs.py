"""README and docs/: links resolve, commands parse, Python compiles and runs, and each family has its section."""

import argparse
import importlib
import pathlib
import re
import shlex
import tomllib

import pytest
from small import ROOT, load_script, pages

from flash_lm.__main__ import module_name
from flash_lm.cli.load import load_config
from flash_lm.cli.words import check_flags, spell
from flash_lm.config.registry import FAMILIES

pytestmark = pytest.mark.usefixtures("usual_promotion")

PAGES = [*pages(), *sorted((ROOT / "docs" / "families").glob("*.md"))]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
IN_A_CELL = re.compile(r"`((?:[A-Z_]+=\S+ )*python [^`…]+ --[^`…]+)`")  # a command without flags is not complete
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A block of Python runs unless it names something that a clone lacks, such as a run, or adds a row to a table.
NOT_HERE = ("runs/", "register_family", "127.0.0.1")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MISSING = "--config.plugins=sigmoid_window"
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


class Parsed(Exception):  # noqa: N818 (no error)
    """Stops a script after it has parsed its flags."""


def blocks(page: pathlib.Path, language: str) -> list[str]:
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def commands() -> list[str]:
    """All complete command lines, without those of other programs."""
    command_lines = {}
    result_pages = [*(ROOT / "studies").glob("*/results/README.md"), ROOT / "benchmarks" / "README.md"]
    in_tables = "\n".join(command for page in result_pages for command in IN_A_CELL.findall(page.read_text()))
    for page in PAGES:
        for block in [*blocks(page, "sh"), *([in_tables] if page == PAGES[0] else [])]:
            for line in re.split(r"\n| && ", block.replace("\\\n", " ")):
                words = shlex.split(line, comments=True)
                words = words[: words.index(">")] if ">" in words else words
                while words and re.match(r"export$|[A-Z_]+=", words[0]):
                    words.pop(0)
                if "|" in words:
                    words = words[words.index("|") + 1 :]
                if words:
                    command_lines[shlex.join(words)] = None
    return list(command_lines)


def check_config(config: str | None, overrides: list[str]) -> None:
    """Checks keys and values against a config, unless it is that of a run or of a reader's module."""
    assert all(word.startswith("--config.") for word in overrides), overrides
    if MISSING not in overrides and (config is None or (ROOT / config).exists() or "/" not in config):
        load_config(config or "quickstart", overrides)


def check_module(words: list[str], monkeypatch) -> None:
    module = importlib.import_module(words[0])
    module = importlib.import_module(f"{words[0]}.__main__") if hasattr(module, "__path__") else module
    if not hasattr(module, "flags"):
        check_program(module, words[1:], monkeypatch)
        return
    parser = module.flags()
    check_flags(parser, words := spell(parser, words[1:]))
    known, others = parser.parse_known_args(words)
    grid = [f"--config.{one}" for one in getattr(known, "grid", None) or []]
    first_values = [re.sub(r"=([^,]*),.*", r"=\1", word) for word in grid]
    check_config(getattr(known, "config", None), others + first_values)


def check_program(program, words: list[str], monkeypatch) -> None:
    others: list[str] = []
    real = argparse.ArgumentParser.parse_known_args

    def parse_known(parser, argv=None, namespace=None):
        others[:] = real(parser, argv, namespace)[1]
        raise Parsed

    def parse_all(parser, argv=None, namespace=None):
        others[:] = real(parser, argv, namespace)[1]
        assert not others, others
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_all)
    with pytest.raises(Parsed):
        program.main(words)
    monkeypatch.undo()
    check_config(next((word.removeprefix("--config=") for word in words if word.startswith("--config=")), None), others)


@pytest.mark.parametrize("command", commands())
def test_a_command_parses(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    # The reader's files, such as books/, are not here.
    monkeypatch.setattr("flash_lm.data.corpus_of_path._names", lambda path: [path if "." in path else "a.txt"])
    first, *words = shlex.split(command)
    if first == "make":
        assert set(word for word in words if "=" not in word) <= TARGETS
    elif first == "flash-lm":
        if not words[0].startswith("--"):
            check_module([f"flash_lm.{module_name(words[0])}", *words[1:]], monkeypatch)
    elif first == "python" and words[0] == "-m":
        check_module(words[1:], monkeypatch)
    elif first == "python" and words[0] == "-c":
        compile(words[1], command, "exec")
    elif first == "python":
        script = pathlib.Path(words[0])
        check_program(load_script(script.stem, str(script.parent)), words[1:], monkeypatch)
    elif first == "pip":
        (extras,) = re.findall(r"\[(.*)\]", words[-1])
        assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys()
    elif "/" in first:
        assert (ROOT / first).exists()
    else:
        assert first in ("source", "curl", "git", "gcloud", "bash", "tensorboard"), (
            f"a command that no test knows: {command}"
        )


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_resolve(page):
    """Pages that Sphinx shows at another path have the same links as in the repository."""
    text = BLOCK.sub("", page.read_text())
    targets = re.findall(r"\]\((?!\w+:)([^)#\s]+)", text) + re.findall(r"\{repository-file\} (\S+)", text)
    assert not [target for target in targets if not (page.parent / target).exists()]
    files = re.findall(r"^```\{results-table\} (\S+)", text, re.MULTILINE) + re.findall(r"\{result\}`(\S+)", text)
    assert not [file for file in files if not (ROOT / file).exists()]


def anchors(page: pathlib.Path) -> set[str]:
    """Anchors of a page's headings, as Markdown viewers make them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_anchors_of_links_exist(page):
    """In the repository, as on the site, whose build checks the same."""
    links = re.findall(r"\]\((?!\w+:)([^)#\s]*)#([^)\s]+)\)", BLOCK.sub("", page.read_text()))
    assert not [(file, name) for file, name in links if name not in anchors(page.parent / file if file else page)]


# tests/layers/test_mixer.py tests the code of layers.md; it and this test are in `make test-all`.
RUN = [
    pytest.param(page, marks=pytest.mark.slow("builds and runs layers") if page.name == "layers.md" else ())
    for page in PAGES
]


@pytest.mark.parametrize("page", RUN, ids=IDS)
def test_python_compiles_and_runs(page):
    names = {"__name__": page.stem}  # a block may use names of earlier blocks
    for block in blocks(page, "python"):
        code = compile(block, str(page), "exec")
        if not any(name in block for name in NOT_HERE):
            exec(code, names)


def test_the_example_of_an_attention_is_the_file_that_is_tested():
    """tests/test_plugins.py tests it."""
    (block,) = blocks(ROOT / "docs" / "extend.md", "python")
    assert block == (ROOT / "tests" / "sigmoid_window.py").read_text()


def test_each_family_has_a_section_a_picture_and_a_line():
    for name, row in FAMILIES.items():
        page = ROOT / "docs" / "families" / f"{name}.md"
        assert page.exists(), f"write {page}: its equation, and what we changed"
        assert page.read_text().startswith("# ") and f"```{{family}} {name}\n" in page.read_text()
        assert row.about and "arXiv:" in row.paper, name
        assert (page.parent / "pictures" / f"{name}.svg").exists(), "run python docs/tools/draw_families.py"
    extra = {page.stem for page in (ROOT / "docs" / "families").glob("*.md")} - FAMILIES.keys()
    assert not extra


def test_the_table_of_families_in_readme_is_current():
    readme = (ROOT / "README.md").read_text()
    assert load_script("write_families", "docs/tools").page(readme) == readme, "run python docs/tools/write_families.py"


def test_the_table_of_mixers_is_current():
    page = (ROOT / "docs" / "layers.md").read_text()
    assert load_script("write_families", "docs/tools").layers(page) == page, "run python docs/tools/write_families.py"


@pytest.mark.representatives("aft_simple")
@pytest.mark.parametrize(
    "family",
    [
        name
        if name in ("flash", "reformer")
        else pytest.param(name, marks=pytest.mark.slow("draws another picture with the same code"))
        for name in FAMILIES
    ],
)
def test_a_picture_is_current(family):
    picture = (ROOT / "docs" / "families" / "pictures" / f"{family}.svg").read_text()
    assert load_script("draw_families", "docs/tools").picture(family) == picture, (
        f"run python docs/tools/draw_families.py --families={family}"
    )


def test_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) < 150
