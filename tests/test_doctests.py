"""The examples in docstrings give what they show."""

import doctest
import importlib
import pathlib

import pytest

ROOT = pathlib.Path(__file__).parent.parent
FILES = [path.relative_to(ROOT) for path in sorted(ROOT.glob("flash_lm/**/*.py")) if ">>> " in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=str)
def test_examples(path: pathlib.Path):
    module = importlib.import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
    result = doctest.testmod(module)
    assert result.attempted, f"{path} has >>> outside of docstrings"
    assert not result.failed
