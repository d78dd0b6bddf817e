"""Clones the authors' repositories that check.toml names into .venv-peers/src, each at its commit.

    python -m benchmarks.peers.fetch

`make peers` runs it. It prints the repositories that cannot be cloned; `check.py` skips them.
"""

import pathlib
import subprocess
import tomllib

TABLE = pathlib.Path(__file__).with_name("check.toml")
SOURCES = pathlib.Path(".venv-peers/src")


def main() -> None:
    """Clones missing repositories, and checks out the commit of each."""
    for about in tomllib.loads(TABLE.read_text(encoding="utf-8")).values():
        if "repository" not in about:
            continue
        path = SOURCES / pathlib.PurePosixPath(about["repository"]).name
        clone = ["git", "clone", "--quiet", f"https://github.com/{about['repository']}", path]
        if not path.exists() and subprocess.run(clone).returncode:
            print(f"not fetched: {about['repository']}")
        elif subprocess.run(["git", "-C", path, "checkout", "--quiet", about["commit"]]).returncode:
            print(f"{about['repository']} has no commit {about['commit']}")


if __name__ == "__main__":
    main()
