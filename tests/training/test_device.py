"""Warnings about accelerators that JAX does not use."""

import logging

import pytest

from flash_lm.training.device import report_unused_accelerator


@pytest.mark.parametrize("chosen", [None, "cpu"])
def test_an_accelerator_that_jax_does_not_use_is_reported(tmp_path, monkeypatch, caplog, chosen):
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    if chosen:
        monkeypatch.setenv("JAX_PLATFORMS", chosen)
    drivers = {str(tmp_path / "nvidia[0-9]*"): "cuda", str(tmp_path / "accel*"): "tpu"}
    with caplog.at_level(logging.WARNING, "flash_lm"):
        report_unused_accelerator(drivers)
        (tmp_path / "nvidia-caps").touch()
        report_unused_accelerator(drivers)
        assert not caplog.records
        (tmp_path / "accel0").touch()
        report_unused_accelerator(drivers)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == (0 if chosen else 1)
    assert chosen or ("accel0, but JAX runs on its CPU: run make setup DEVICE=tpu" in messages[0])
