"""Notices of a cloud, from a local server that answers as Google's metadata server does."""

import threading
import time

import pytest
from metadata_server import MetadataServer
from small import command, override_flags, small_config, write_corpus

from flash_lm.runs import google_metadata
from flash_lm.training import preemption
from flash_lm.training.interrupt import stop_on_signal
from flash_lm.training.preemption import watch_for_preemption


@pytest.fixture
def cloud(monkeypatch):
    monkeypatch.setattr(preemption, "_PAUSE_S", 0.01)
    server = MetadataServer(preempted="FALSE", maintenance_event="NONE")
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{server.server_port}")
    yield server
    server.shutdown()
    server.server_close()


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_notice_stops_and_says_why(cloud, capfd):
    with stop_on_signal() as should_stop:
        cloud.wait_until_watched()
        assert not should_stop()
        cloud.change("preempted", "TRUE")
        wait_for(should_stop)
    assert "Google Cloud preempts this machine" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("key", "before", "changes", "noticed"),
    [
        ("preempted", "TRUE", [], True),  # a run that starts in the last seconds
        ("maintenance-event", "NONE", ["TERMINATE_ON_HOST_MAINTENANCE"], True),
        ("maintenance-event", "NONE", ["MIGRATE_ON_HOST_MAINTENANCE", "NONE"], False),  # the machine runs on
        # Announced before the run started: it would else end at once, and start again, until the machine is stopped.
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", [], False),
        ("maintenance-event", "TERMINATE_ON_HOST_MAINTENANCE", ["NONE", "TERMINATE_ON_HOST_MAINTENANCE"], True),
    ],
)
def test_which_values_are_notices(cloud, key, before, changes, noticed):
    reasons = []
    cloud.change(key, before)
    watch_for_preemption(reasons.append)
    for number, value in enumerate(changes, start=1):
        wait_for(lambda number=number: cloud.asked.count((key, True)) >= number)  # it has seen the change before
        cloud.change(key, value)
    if noticed:
        wait_for(lambda: reasons)
    else:
        cloud.wait_until_watched()
        time.sleep(0.1)
    assert len(reasons) == noticed


def watchers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if getattr(thread, "_target", None) is preemption._watch]


@pytest.mark.parametrize(("name", "value"), [("flavor", "Another"), ("status", 403), ("status", 404)])
def test_another_server_is_not_watched(cloud, name, value):
    before = len(watchers())
    setattr(cloud, name, value)
    cloud.change("preempted", "TRUE")
    reasons = []
    watch_for_preemption(reasons.append)
    wait_for(lambda: len(watchers()) <= before)
    assert not reasons


def test_without_a_server_nothing_waits(monkeypatch):
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    before, since = len(watchers()), time.monotonic()
    with stop_on_signal() as should_stop:
        assert time.monotonic() - since < 1 and not should_stop()
        wait_for(lambda: len(watchers()) <= before)


def test_a_server_that_fails_for_a_while_is_asked_again(cloud):
    reasons = []
    watch_for_preemption(reasons.append)
    cloud.wait_until_watched()
    cloud.status = 503
    cloud.change("preempted", "?")
    wait_for(lambda: cloud.asked.count(("preempted", True)) > 2)
    cloud.status = 200
    cloud.change("preempted", "TRUE")
    wait_for(lambda: reasons)


def test_a_server_that_is_late_at_boot_is_asked_again(cloud, monkeypatch, tmp_path):
    (tmp_path / "product_name").write_text("Google Compute Engine\n")
    monkeypatch.setattr(google_metadata, "_PRODUCT", tmp_path / "product_name")
    cloud.status = 503
    reasons = []
    watch_for_preemption(reasons.append)
    wait_for(lambda: cloud.asked.count(("preempted", False)) > 2)
    cloud.status = 200
    cloud.wait_until_watched()
    cloud.change("preempted", "TRUE")
    wait_for(lambda: reasons)


@pytest.mark.slow("starts a process that trains")
def test_a_run_ends_with_a_checkpoint_when_its_machine_is_preempted(cloud, tmp_path):
    config = small_config(write_corpus(tmp_path / "text"), tmp_path / "cache", "flash")
    words = ["--config=configs/base.py", *override_flags(config), f"--workdir={tmp_path / 'run'}"]
    process = command("flash_lm.train", *words, "--config.train.steps=4000", "--config.train.checkpoint_every=5")
    wait_for(lambda: process.poll() is not None or (tmp_path / "run" / "checkpoints" / "5").is_dir())
    cloud.change("preempted", "TRUE")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "Google Cloud preempts this machine" in err, err
    assert "run the same command to continue" in out
