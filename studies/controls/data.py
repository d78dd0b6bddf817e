"""Makes the texts of the controls once, from the folder of data."""

import os
import pathlib
import shutil

from flash_lm.runs.provenance import hash_of_files
from studies.controls import anchor
from studies.controls.design import Data
from studies.quality import data as texts


def prepare_texts(data: pathlib.Path, folder: pathlib.Path) -> Data:
    """Returns the texts in a folder, and writes them if they are missing.

    Args:
        data: folder with books/, wiki/, imdb/ (see studies/quality/data.py) and shakespeare/input.txt.
        folder: gets study/ and shakespeare/, both or none.

    Raises:
        InputError: a text is missing.
    """
    if not folder.exists():
        partial = folder.with_name(f"{folder.name}.{os.getpid()}")
        anchor.write_text(data / "shakespeare" / "input.txt", partial / "shakespeare")
        texts.main([str(data), f"--out={partial / 'study'}"])
        try:
            os.replace(partial, folder)
        except OSError:
            shutil.rmtree(partial)
            if not folder.exists():  # otherwise another process was faster
                raise
    return Data(folder, hash_of_files(folder, (".jsonl", ".txt")))
