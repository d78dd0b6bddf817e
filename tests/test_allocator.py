"""A command keeps what it frees, so that the arrays of the next step are not faulted in page by page."""

import os
import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
import numpy as np
from flash_lm.command import run

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    np.ones(2**25)  # 256 MB, freed at once
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

run(lambda argv: print(faults(), faults()))
"""


def faults(**environment: str) -> list[int]:
    """Of the first array of 256 MB and of the second one."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | environment, check=True, capture_output=True, text=True
    )
    return [int(word) for word in done.stdout.split()]


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have other settings")
def test_freed_memory_is_kept():
    first, second = faults()
    assert second < first / 8
    first, second = faults(MALLOC_TRIM_THRESHOLD_="131072")  # the user's own setting stays
    assert second > first / 2
