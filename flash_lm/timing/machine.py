"""The machine of a benchmark: what each line records of it, and how tables name it beside their ratios."""

from collections.abc import Sequence

import jax

from flash_lm.runs.jsonl import Line
from flash_lm.runs.provenance import cpu_name, provenance


def machine() -> Line:
    """Returns what each line records: the device, the CPU beside it, versions and commit.

    It prints first if no commit has the code that is measured. Called before anything is measured.
    """
    kind = jax.devices()[0].device_kind
    about = provenance(kind)
    if about["dirty"] is not False:
        why = "the code has uncommitted changes" if about["dirty"] else "the code is in no repository"
        print(f"WARNING: {why}, so no page may quote these lines: commit, then measure again", flush=True)
    # Launches and compilation of a GPU's programs depend on the CPU of its machine.
    return about if kind == "cpu" else about | {"host": cpu_name()}


def machines(lines: Sequence[Line]) -> str:
    """Returns the devices and CPUs of lines in words, for the title of a table of ratios.

    >>> machines([{"device": "NVIDIA H200", "host": "Intel Xeon, 16 threads"}])
    'NVIDIA H200 (Intel Xeon, 16 threads)'
    >>> machines([{"device": "AMD EPYC, 2 threads", "dirty": True}])
    'AMD EPYC, 2 threads; uncommitted changes'
    """
    names = dict.fromkeys(f"{x['device']} ({x['host']})" if "host" in x else x["device"] for x in lines)
    return " and ".join(names) + ("; uncommitted changes" if any(line.get("dirty") for line in lines) else "")
