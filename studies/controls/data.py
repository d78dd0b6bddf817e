"""The texts of the controls, made once from the folder of data."""

import os
import pathlib
import shutil
import subprocess
import sys

from flash_lm.errors import RunError
from flash_lm.runs.provenance import hash_of_files
from studies.controls import anchor
from studies.controls.design import Data

_SCRIPT = pathlib.Path(__file__).parents[2] / "scripts" / "study_data.py"


def prepared(data: pathlib.Path, folder: pathlib.Path) -> Data:
    """The texts in a folder; they are written there if they are not yet.

    Args:
        data: with books/, wiki/, imdb/ (see studies/quality/data.py) and shakespeare/input.txt.
        folder: gets study/ and shakespeare/, whole or not at all.

    Raises:
        InputError: there is no text of Shakespeare.
        RunError: studies/quality/data.py failed; it has said why.
    """
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        anchor.write_text(data / "shakespeare" / "input.txt", partial / "shakespeare")
        if subprocess.run([sys.executable, str(_SCRIPT), str(data), f"--out={partial / 'study'}"]).returncode:
            raise RunError(f"the texts in {data} could not be prepared")
        try:
            os.replace(partial, folder)
        except OSError:
            shutil.rmtree(partial)
            if not folder.exists():  # else another process was faster
                raise
    return Data(folder, hash_of_files(folder, (".jsonl", ".txt")))
