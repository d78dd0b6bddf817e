"""The examples in docstrings run and print what they say."""

import doctest
import importlib
import pathlib

import pytest
from small import ROOT, small_config, write_corpus

from flash_lm.training.train_loop import train

FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in ("flash_lm", "studies", "benchmarks")
    for path in (ROOT / folder).rglob("*.py")
    if " >>> " in path.read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, usual_promotion) -> pathlib.Path:
    """A working directory with runs/mine, a small causal model of bytes, and text, what it was trained on."""
    folder = tmp_path_factory.mktemp("examples")
    config = small_config(write_corpus(folder / "text"), folder / "cache")
    config.train.update(steps=2, warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0)
    train(config, folder / "runs" / "mine")
    return folder


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_run(name, folder, restore_registries, monkeypatch):
    monkeypatch.chdir(folder)
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=FLAGS)
    for test in doctest.DocTestFinder(recurse=True).find(module, module.__name__):
        runner.run(test)
    assert runner.summarize(verbose=False).failed == 0
    assert runner.tries
