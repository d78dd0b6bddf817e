"""The launcher starts a command again after a crash or a lost host, and not when that would not help."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
from jax.errors import JaxRuntimeError
from small import ROOT

from flash_lm import launch
from flash_lm.cli.run import run
from flash_lm.errors import InputError, NonfiniteError, PassingError, RunError
from flash_lm.runs.storage import to_path

# Ends with the next of these exit codes each time, or by a signal if it is negative; appends what it was started with
# to a file. A code with a + saves a checkpoint first; "wait" waits for a signal, and ends with 75 as a run does.
COMMAND = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
codes = sys.argv[2].split(",")
words = sys.argv[3:]
number = words[-1].rpartition(",")[2] if words and words[-1].startswith("--hosts") else "0"
with open(folder / f"started-{number}", "a") as file:
    print(*words, os.environ.get("JAX_LOCAL_DEVICE_IDS"), file=file)
attempt = len((folder / f"started-{number}").read_text().splitlines()) - 1
code = codes[attempt] if number == "0" else "wait"
if code.endswith("+"):
    (folder / "run" / "checkpoints" / str(10 * attempt + 10)).mkdir(parents=True)
if code == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    print("waits", flush=True)
    time.sleep(60)
code = int(code.rstrip("+"))
if code < 0:
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    for name, value in {"_PAUSE_S": 0.01, "_LOOK_S": 0.005, "_GRACE_S": 0.05}.items():
        monkeypatch.setattr(launch, name, value)
    before = {number: signal.getsignal(number) for number in launch._FORWARDED}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def starts(folder, number: int = 0) -> list[str]:
    return (folder / f"started-{number}").read_text().splitlines()


def launched(folder, codes: str, *launcher_flags: str) -> tuple[int, int]:
    """The exit code of the launcher, and how often it started the command."""
    command = [sys.executable, "-S", "-c", COMMAND, str(folder), codes, f"--workdir={folder}/run"]
    with pytest.raises(SystemExit) as ended:
        launch.main([*launcher_flags, *command])
    return ended.value.code, len(starts(folder))


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ("75,-9,0", (0, 3)),  # a lost host, a killed process
        ("137,0", (0, 2)),  # killed, as a shell says it
        ("0", (0, 1)),
        ("2", (2, 1)),  # bad input
        ("70,0", (0, 2)),  # an unexpected error
        ("75,1", (1, 2)),  # the loss is not finite
        ("130", (130, 1)),  # Ctrl-C
        ("134,134,134,134", (134, 3)),  # a crash loop
        ("134,134+,134,134,134", (134, 4)),  # a checkpoint, and then the loop
        ("134,134+,134,134+,134,0", (0, 6)),  # it gets on
    ],
)
def test_what_is_started_again(tmp_path, codes, expected):
    assert launched(tmp_path, codes, "--restarts=2") == expected


def test_the_processes_of_a_machine_know_each_other_and_end_together(tmp_path):
    """The second process hangs when the first is killed; both are started again, with another address."""
    code, count = launched(tmp_path, "-9,2", "--processes=2")
    assert (code, count, len(starts(tmp_path, 1))) == (2, 2, 2)
    addresses = []
    for number in range(2):
        words = [line.split() for line in starts(tmp_path, number)]
        assert [devices for *_, devices in words] == [str(number)] * 2
        addresses.append([flag.removesuffix(f",2,{number}") for _, flag, _ in words])
    assert addresses[0] == addresses[1] and len({*addresses[0]}) == 2
    assert all(address.startswith("--hosts=127.0.0.1:") for address in addresses[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on_once_and_ends_the_launcher(tmp_path, number):
    """As that of a scheduler: the run saves and ends with 75, and is not started again."""
    command = COMMAND.replace("signal.SIGTERM, lambda", f"{int(number)}, lambda")
    words = [sys.executable, "-m", "flash_lm.launch", sys.executable, "-S", "-c", command, str(tmp_path), "wait"]
    usual = lambda: signal.signal(number, signal.SIG_DFL)  # a shell ignores some in the background
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=os.environ, preexec_fn=usual)
    assert process.stdout and process.stdout.readline() == "waits\n"
    process.send_signal(number)
    assert process.wait(20) == 75
    assert len(starts(tmp_path)) == 1


def test_a_signal_during_the_pause_ends_the_launcher(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "_PAUSE_S", 30.0)
    say = launch._say
    monkeypatch.setattr(launch, "_say", lambda line: (say(line), signal.raise_signal(signal.SIGTERM)))
    since = time.monotonic()
    assert launched(tmp_path, "75,0") == (75, 1) and time.monotonic() - since < 10


def test_checkpoints_of_an_object_store_count(bucket, tmp_path):
    """Complete ones, and only where they can be read."""
    command = ["ssh", "host", "--command=cd x && train --workdir=gs://bucket/runs/x --config=y"]
    assert launch._newest_checkpoint(command) == -1
    for step, name in ((5, "commit_success.txt"), (10, "commit_success.txt"), (15, "state")):
        (to_path(f"gs://bucket/runs/x/checkpoints/{step}") / name).write_text("")
    assert launch._newest_checkpoint(command) == 10
    bucket.forbidden = "GET .*"
    assert launch._newest_checkpoint(command) == -1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("bad"), 2),
        (NonfiniteError("nan"), 1),
        (RunError("full"), 1),
        (PassingError("no route"), 75),
        (JaxRuntimeError("INTERNAL: NCCL"), 70),
        (MemoryError(), 70),
        (ConnectionResetError(104, "reset"), 70),
        (OSError(errno.ENOSPC, "No space left on device", "a"), 1),
    ],
)
def test_the_exit_code_says_whether_another_start_may_help(monkeypatch, capsys, error, code):
    def fail(words):
        raise error

    monkeypatch.setattr(sys, "argv", ["train"])
    with pytest.raises(SystemExit) as ended:
        run(fail)
    assert ended.value.code == code and (code in launch._FINAL) == (code in (1, 2))
    err = capsys.readouterr().err
    assert ("Traceback" in err) == (code == 70) and (err.startswith("error: ") or code == 70)


def test_a_command_that_does_not_exist(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["launch", "no-such-program", "--workdir=x"])
    with pytest.raises(SystemExit) as ended:
        run(launch.main, launch.flags)
    assert ended.value.code == 2 and "error: cannot run no-such-program" in capsys.readouterr().err
