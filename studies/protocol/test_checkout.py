"""A study's checkout: the code of its commit, with a copy of the environment."""

import os
import sys

import pytest

from flash_lm.errors import InputError, RunError
from studies.protocol.checkout import checkout, git, python_path, short_commit
from studies.protocol.first_losses import differences


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """A repository of two commits, and an environment of few files."""
    folder, prefix = tmp_path / "tree", tmp_path / "environment"
    packages = prefix / "lib" / "python3" / "site-packages"
    packages.mkdir(parents=True)
    (prefix / "bin").mkdir()
    (prefix / "bin" / "python").symlink_to(sys.executable)
    for name in ("library.py", "__editable__.flash_lm.pth", "__editable___flash_lm_finder.py"):
        (packages / name).write_text("one")
    monkeypatch.setattr(sys, "prefix", str(prefix))
    folder.mkdir()
    git(folder, "init", "--quiet")
    for text in ("first", "second"):
        (folder / "code.py").write_text(text)
        git(folder, "add", "code.py")
        git(folder, "-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", text)
    return folder


def test_it_has_the_code_of_the_commit_and_a_separate_environment(tree, tmp_path):
    first = short_commit(tree, "HEAD~1")
    path = checkout(tree, first, tmp_path / "checkouts")
    assert path.name == first and (path / "code.py").read_text() == "first"
    packages = path / ".venv" / "lib" / "python3" / "site-packages"
    assert sorted(path.name for path in packages.iterdir()) == ["library.py"]  # and nothing that leads to the tree
    assert os.path.samefile(python_path(path), sys.executable)
    # An installer removes a file and writes another one.
    library = tmp_path / "environment" / "lib" / "python3" / "site-packages" / "library.py"
    library.unlink()
    library.write_text("two")
    (tree / "code.py").write_text("third")
    assert (packages / "library.py").read_text() == "one" and (path / "code.py").read_text() == "first"
    (path / "mark").touch()
    assert checkout(tree, first, tmp_path / "checkouts") == path and (path / "mark").exists()
    assert [path.name for path in (tmp_path / "checkouts").iterdir()] == [first]
    (path / "code.py").write_text("changed by hand")
    with pytest.raises(InputError, match="is no longer .* as it was committed: remove it"):
        checkout(tree, first, tmp_path / "checkouts")


def test_what_is_wrong_is_said_and_nothing_is_half_made(tree, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="git rev-parse .*nothing"):
        short_commit(tree, "nothing")
    monkeypatch.setattr(sys, "prefix", sys.base_prefix)
    with pytest.raises(InputError, match=r"is of no environment that could be copied: use .venv/bin/python"):
        checkout(tree, short_commit(tree, "HEAD"), tmp_path / "checkouts")
    assert not (tmp_path / "checkouts").exists()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "no_such_folder"))
    with pytest.raises(RunError, match="cannot be copied"):
        checkout(tree, short_commit(tree, "HEAD"), tmp_path / "checkouts")
    assert [*(tmp_path / "checkouts").iterdir()] == []


def test_only_commits_with_the_same_first_losses_are_alike():
    one = {"a": [8.0, 7.5], "b": [9.0, 8.0]}
    assert differences(one, {"a": [8.0, 7.5 + 9e-7], "c": [1.0, 1.0]}) == []
    (problem,) = differences(one, {"a": [8.0, 7.5], "b": [9.0, 8.0 + 2e-6]})
    assert len(differences(one, {"a": [8.0, float("nan")]})) == 1
    assert problem.startswith("b: first losses [9.0, 8.0] and [9.0, 8.000002] differ by more than 1e-06 nats")
