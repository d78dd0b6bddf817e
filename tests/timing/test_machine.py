"""What lines record of their machine."""

import jax
import pytest

from flash_lm.timing import machine as of_machine
from flash_lm.timing.machine import machine


@pytest.mark.parametrize(("dirty", "said"), [(True, "uncommitted changes"), (None, "no repository"), (False, "")])
def test_lines_that_no_page_may_quote_are_announced(monkeypatch, capsys, dirty, said):
    """Only the device itself is faked: a GPU's lines also name the CPU beside it."""
    of_kind = lambda kind: {"device": kind, "git": "abc", "dirty": dirty}
    monkeypatch.setattr(of_machine, "provenance", of_kind)
    about = machine()
    printed = capsys.readouterr().out
    assert printed.startswith("WARNING") == bool(said) and said in printed
    assert "host" not in about
    monkeypatch.setattr(jax, "devices", lambda: [type("GPU", (), {"device_kind": "NVIDIA H200"})])
    assert machine()["device"] == "NVIDIA H200" and machine()["host"].endswith("threads")
