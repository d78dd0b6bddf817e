"""Several processes train one run: equal losses, each file written once, and no host waits for one that has died."""

import contextlib
import importlib.util
import json
import mmap
import os
import pathlib
import platform
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import numpy as np
import pytest
from metadata_server import MetadataServer
from small import command, override_flags, python, small_config, write_corpus

from flash_lm.config.experiment import parse
from flash_lm.data.token_cache import load_tokenized
from flash_lm.errors import InputError
from flash_lm.inference.generation import Generator
from flash_lm.inference.model import load_model
from flash_lm.inference.sampling import Sampling
from flash_lm.runs import lost_hosts
from flash_lm.runs.hosts import parse_hosts
from flash_lm.runs.jsonl import read_jsonl

pytestmark = pytest.mark.usefixtures("usual_promotion")
DEVICES = 4  # of all hosts


@pytest.fixture(scope="module")
def words(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("corpus")
    config = small_config(write_corpus(folder / "text"), folder / "cache", "flash")
    return ["--config=configs/base.py", *override_flags(config)]


def hosts_flag(hosts: int) -> str:
    """The --hosts flag without the number of the host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"--hosts=127.0.0.1:{free.getsockname()[1]},{hosts}"


def start(hosts: int, *words: str) -> list[subprocess.Popen]:
    if hosts == 1:
        return [command("flash_lm.train", *words, devices=DEVICES)]
    flag = hosts_flag(hosts)
    return [command("flash_lm.train", *words, f"{flag},{i}", devices=DEVICES // hosts) for i in range(hosts)]


def finish(processes: list[subprocess.Popen]) -> list[str]:
    outputs = [process.communicate(timeout=300) for process in processes]
    assert not any(process.returncode for process in processes), outputs
    return [out for out, _ in outputs]


def figures(workdir) -> list[tuple]:
    return [(line["step"], line["split"], line["loss"]) for line in read_jsonl(workdir / "metrics.jsonl")]


@pytest.fixture(scope="module")
def alone(words, tmp_path_factory):
    workdir = tmp_path_factory.mktemp("runs") / "alone"
    finish(start(1, *words, f"--workdir={workdir}"))
    return workdir


@pytest.mark.slow("starts up to four processes that train")
@pytest.mark.parametrize(("hosts", "mesh"), [(2, "(4,1,1)"), (4, "(4,1,1)"), (2, "(1,2,2)")])
def test_the_losses_are_those_of_one_host(words, alone, tmp_path, hosts, mesh):
    outputs = finish(start(hosts, *words, f"--config.mesh.shape={mesh}", f"--workdir={tmp_path / 'run'}"))
    assert "step 0 of 12" in outputs[0] and not any("step " in out for out in outputs[1:])
    for (step, split, loss), (*step_and_split, expected) in zip(figures(tmp_path / "run"), figures(alone), strict=True):
        assert [step, split] == step_and_split
        np.testing.assert_allclose(loss, expected, rtol=1e-6 if mesh == "(4,1,1)" else 1e-5)
    names = lambda folder: sorted(path.name for path in folder.iterdir())
    assert names(tmp_path / "run") == names(alone) and len(names(tmp_path / "run" / "tensorboard")) == 1


@pytest.mark.slow("starts two processes that train, twice, and waits for a lost host to be noticed")
@pytest.mark.parametrize("killed", [0, 1], ids=["the_first", "another"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_end_when_one_host_is_killed(words, tmp_path, killed, number):
    """They end within a minute. Started again, all go on; a signal to one of them ends all at the same step."""
    long = [*words, "--config.train.steps=4000", "--config.train.checkpoint_every=50", f"--workdir={tmp_path / 'run'}"]
    processes = start(2, *long)
    while not (tmp_path / "run" / "checkpoints" / "50").is_dir():
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        time.sleep(0.05)
    processes[killed].send_signal(number)
    since, left = time.monotonic(), processes[1 - killed]
    _, err = left.communicate(timeout=60)
    assert time.monotonic() - since < 60 and left.returncode == 75, err
    assert [line for line in err.splitlines() if "error" in line] == [
        f"error: host {killed} ({platform.node()}) is gone: start all hosts again, and the run continues from its "
        "newest checkpoint"
    ]
    assert "stack trace" not in err
    processes[killed].kill()
    processes[killed].communicate()
    again = start(2, *long)
    time.sleep(1)
    deadline = time.monotonic() + 120
    while not any(int(p.name) > 50 for p in (tmp_path / "run" / "checkpoints").iterdir() if p.name.isdecimal()):
        assert time.monotonic() < deadline and all(process.poll() is None for process in again)
        time.sleep(0.05)
    again[1].terminate()
    outputs = [process.communicate(timeout=300) for process in again]
    assert {process.returncode for process in again} == {75}, outputs
    assert "run the same command to continue" in outputs[0][0]
    steps = [step for step, split, _ in figures(tmp_path / "run") if split == "train"]
    assert steps == list(range(1, len(steps) + 1))


@pytest.mark.slow("starts two processes that train, twice")
def test_the_launcher_starts_again_when_a_process_is_killed(words, tmp_path):
    """The run has every step once, and its losses are those of one that was not killed."""
    run, steps = tmp_path / "run", ["--config.train.steps=60", "--config.train.checkpoint_every=10"]
    command = [sys.executable, "-m", "flash_lm.train", *words, *steps, f"--workdir={run}"]
    launcher = python("-m", "flash_lm.launch", "--processes=2", *command, devices=DEVICES // 2)
    deadline = time.monotonic() + 120
    while not (run / "checkpoints" / "20").is_dir():
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    children = pathlib.Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    os.kill(int(children[1]), signal.SIGKILL)
    _, err = launcher.communicate(timeout=200)
    assert launcher.returncode == 0, err
    assert "exit code 137: it starts again in 5 s, 1 of 5 times in a row" in err, err
    finish(start(1, *words, *steps, f"--workdir={tmp_path / 'whole'}"))
    assert [step for step, split, _ in figures(run) if split == "train"] == list(range(1, 61))
    for (step, split, loss), (*step_and_split, expected) in zip(figures(run), figures(tmp_path / "whole"), strict=True):
        assert [step, split] == step_and_split
        np.testing.assert_allclose(loss, expected, rtol=1e-5)


@pytest.mark.slow("starts two processes, and waits for them")
def test_a_notice_to_one_host_stops_all_at_one_step(words, tmp_path):
    """A cloud preempts one of the machines: the other one saves and ends with it."""
    server = MetadataServer(preempted="FALSE", maintenance_event="NONE")
    long = [*words, "--config.train.steps=4000", f"--workdir={tmp_path / 'run'}"]
    flag, environment = hosts_flag(2), os.environ | {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
    processes = [
        command("flash_lm.train", *long, f"{flag},{i}", devices=DEVICES // 2, env=environment if i else os.environ)
        for i in range(2)
    ]
    while not (tmp_path / "run" / "metrics.jsonl").exists():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.05)
    server.change("preempted", "TRUE")
    (out, _), (_, err) = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [75, 75]
    assert f"Google Cloud preempts this machine ({platform.node()})" in err
    step = figures(tmp_path / "run")[-1][0]
    assert f"stopped and saved at step {step}" in out and (tmp_path / "run" / "checkpoints" / str(step)).is_dir()


@pytest.mark.slow("starts two processes")
@pytest.mark.parametrize(("flag", "expected"), [((), "2 4"), (("--hosts=alone",), "1 2")])
def test_tasks_of_srun_find_each_other(flag, expected):
    """With the variables of srun, and no flag."""
    program = """
import argparse, sys, jax
from flash_lm.cli.flags import add_begin_flags, begin
parser = argparse.ArgumentParser()
add_begin_flags(parser)
begin(parser.parse_args())
print(jax.process_count(), jax.device_count())
"""
    port = hosts_flag(1).rpartition(":")[2].partition(",")[0]
    job = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    job |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_LOCALID": "0", "JAX_COORDINATOR_PORT": port}
    processes = [
        python("-c", program, *flag, devices=2, env=os.environ | job | {"SLURM_PROCID": str(i)}) for i in range(2)
    ]
    assert [out.splitlines()[-1] for out in finish(processes)] == [expected] * 2


@pytest.mark.slow("waits for a host that does not come")
@pytest.mark.parametrize("number", [0, 1])
def test_hosts_that_do_not_all_start_end_with_one_line(number):
    program = """
import functools, sys, jax
jax.distributed.initialize = functools.partial(jax.distributed.initialize, initialization_timeout=4)
from flash_lm.runs.hosts import join, parse_hosts
join(*parse_hosts(sys.argv[1]))
"""
    process = python("-c", program, f"{hosts_flag(2).partition('=')[2]},{number}", devices=1)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "stack trace" not in err
    assert "error: the hosts have not all connected within five minutes" in err


@pytest.mark.slow("starts two processes that train")
def test_hosts_tokenise_a_corpus_together(tmp_path):
    """Their cache has the files that one host writes."""
    config = small_config(write_corpus(tmp_path / "text", documents=60, lines=400), tmp_path / "alone", "flash")
    load_tokenized(parse(config).data)
    config.data.cache_dir = str(tmp_path / "together")
    finish(start(2, "--config=configs/base.py", *override_flags(config), f"--workdir={tmp_path / 'run'}"))
    read = lambda folder: {x.relative_to(folder): x.read_bytes() for x in folder.rglob("*") if x.is_file()}
    assert read(tmp_path / "together") == read(tmp_path / "alone")


@pytest.mark.slow("starts six processes that train")
def test_a_streamed_run_goes_on_with_another_number_of_hosts(words, tmp_path):
    """On two hosts, on one, on two again: its losses are those of a run with two streams on one host."""
    draw = np.random.default_rng(0)
    rows = [" ".join(map(str, draw.integers(1000, size=draw.integers(1, 40)))) for _ in range(400)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
    keys = {"corpus": "hf", "path": tmp_path / "train.jsonl", "streaming": "True", "tokenizer": "bytes"}
    stream = [*words, *(f"--config.data.{key}={value}" for key, value in keys.items()), "--config.train.keep=9"]
    finish(start(1, *stream, "--config.data.streams=2", f"--workdir={tmp_path / 'whole'}"))
    steps = sorted(int(path.name) for path in (tmp_path / "whole" / "checkpoints").iterdir())
    assert len(steps) > 2
    for hosts, last in ((2, steps[0]), (1, steps[1]), (2, steps[-1])):
        finish(start(hosts, *stream, f"--workdir={tmp_path / 'run'}"))
        for step in steps:
            if step > last:
                shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
    for (step, split, loss), (*step_and_split, expected) in zip(
        figures(tmp_path / "run"), figures(tmp_path / "whole"), strict=True
    ):
        assert [step, split] == step_and_split
        np.testing.assert_allclose(loss, expected, rtol=1e-6)


# A train command with this order of devices in the mesh; only the first host can read checkpoints.
PERMUTED = """
import sys
import jax, numpy as np
from flash_lm.config.mesh import MESH_AXES
from flash_lm.training import checkpoint_read, setup
from flash_lm import train
from flash_lm.cli.run import run
order, intact, *sys.argv[1:] = sys.argv[1:]
order = [int(i) for i in order.split(",")]
shape = lambda config: [len(order) if n == -1 else n for n in config.shape]
axes = (jax.sharding.AxisType.Auto,) * 3
setup.make_mesh = lambda config: jax.sharding.Mesh(
    np.array(jax.devices())[order].reshape(shape(config)), MESH_AXES, axis_types=axes
)
read = checkpoint_read._read_step
def fails(*words):
    if intact == "no" and jax.process_index():
        raise OSError(5, "Input/output error")
    return read(*words)
checkpoint_read._read_step = fails
run(train.main)
"""


def start_permuted(order: str, intact: str, *words: str) -> list[subprocess.Popen]:
    flag = hosts_flag(2)
    arguments = ("-c", PERMUTED, order, intact, *words)
    return [python(*arguments, f"{flag},{i}", devices=DEVICES // 2) for i in range(2)]


@pytest.mark.slow("starts two processes that train")
@pytest.mark.parametrize(
    ("order", "mesh"),
    [("0,2,1,3", "(4,1,1)"), ("3,0,2,1", "(4,1,1)"), ("0,2,1,3", "(2,1,2)"), ("0,1,2,3", "(1,1,4)")],
)
def test_any_order_of_devices_gives_the_losses_of_one_host(words, alone, tmp_path, order, mesh):
    """Also where the tensor axis spans the hosts, which then read the same rows."""
    settings = (f"--config.mesh.shape={mesh}", "--config.model.num_heads=4", f"--workdir={tmp_path / 'run'}")
    finish(start_permuted(order, "yes", *words, *settings))
    for (step, split, loss), (*step_and_split, expected) in zip(figures(tmp_path / "run"), figures(alone), strict=True):
        assert [step, split] == step_and_split
        np.testing.assert_allclose(loss, expected, rtol=1e-6 if mesh == "(4,1,1)" else 1e-5)


@pytest.mark.slow("starts three processes")
def test_a_checkpoint_that_one_host_cannot_read_ends_all(words, alone, tmp_path):
    """Each prints the same line, and nothing is moved or lost."""
    run = shutil.copytree(alone, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "12")
    before = sorted(path.name for path in (run / "checkpoints").iterdir())
    for process in start_permuted("0,1,2,3", "no", *words, f"--workdir={run}"):
        _, err = process.communicate(timeout=120)
        (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
        assert process.returncode == 2 and "host 1: [Errno 5] Input/output error" in line, err
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == before
    finish(start(1, *words, f"--workdir={run}"))
    assert figures(run) == figures(alone)


@pytest.mark.slow("starts six processes")
@pytest.mark.parametrize("mesh", ["2,1,2", "1,2,2"])
def test_several_hosts_score_and_generate_as_one_does(alone, tmp_path, mesh):
    commands = {
        "evaluate": ("--split=validation", f"--results={tmp_path / 'results.jsonl'}"),
        "generate": ("--prompt=the cat", "--max_tokens=9", "--json"),
    }
    for name, words in commands.items():
        flag, words = hosts_flag(2), (f"--workdir={alone}@best", *words)
        several = [
            command(f"flash_lm.{name}", *words, f"--mesh={mesh}", f"{flag},{i}", devices=DEVICES // 2) for i in range(2)
        ]
        first, second = finish(several)
        (one,) = finish([command(f"flash_lm.{name}", *words, devices=1)])
        if name == "generate":
            sharded, single = (json.loads(out) for out in (first, one))  # a line of a library would not be JSON
            assert sharded["tokens"] == single["tokens"] and np.allclose(
                sharded["log_probs"], single["log_probs"], atol=1e-4
            )
        assert not second
    scores = [line["loss"] for line in read_jsonl(tmp_path / "results.jsonl")]
    assert len(scores) == 2 and np.isclose(*scores, rtol=1e-6)


@pytest.mark.slow("starts two processes of the service, and waits for them")
def test_several_hosts_serve_as_one_does(alone):
    """Concurrent requests, after an idle time; all hosts end with the first one."""
    flag, port = hosts_flag(2), hosts_flag(1).partition(":")[2].partition(",")[0]
    words = (f"--workdir={alone}", "--mesh=1,1,2", "--rows=2", "--prompt_tokens=8", "--new_tokens=8", f"--port={port}")
    processes = [command("flash_lm.serve", *words, f"{flag},{i}", devices=1) for i in range(2)]
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").status_code == 200:
                break
        time.sleep(0.2)
    time.sleep(3)
    ask = lambda prompt: httpx.post(f"{url}/api/generate", json={"prompt": prompt, "temperature": 0}, timeout=60).json()
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(ask, ("the", "a dog", "cat")))
    generator = Generator(load_model(alone, mesh_shape=(1, 1, 1) if jax.device_count() == 1 else (1, 4, 2)))
    expected = [generator.generate([x], 8, Sampling(temperature=0))[0].text for x in ("the", "a dog", "cat")]
    assert [answer["text"] for answer in answers] == expected
    words = {"prompt": "a dog", "max_tokens": 0, "echo": True, "logprobs": 0}
    (choice,) = httpx.post(f"{url}/v1/completions", json=words, timeout=60).json()["choices"]
    (scored,) = generator.engine.score_rows([generator.check(["a dog"], 1)[0]])
    np.testing.assert_allclose(choice["logprobs"]["token_logprobs"][1:], scored.log_probs[1:], atol=1e-4)
    processes[0].send_signal(signal.SIGINT)
    finish(processes)


@pytest.mark.slow("starts two processes")
def test_hosts_with_other_settings_are_refused(words, tmp_path):
    flag = hosts_flag(2)
    settings = ("--config.train.learning_rate=0.01", "--config.train.learning_rate=0.02")
    processes = [
        command("flash_lm.train", *words, f"--workdir={tmp_path / 'r'}", setting, f"{flag},{i}", devices=2)
        for i, setting in enumerate(settings)
    ]
    for process in processes:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 2 and "the hosts differ in config" in err
    assert not (tmp_path / "r").exists()


def test_the_message_of_jax_for_a_lost_host():
    """With a message that is not recognized, the user would see a stack trace of C++."""
    spec = importlib.util.find_spec("jaxlib")
    assert spec and spec.origin
    contents = []
    for path in pathlib.Path(spec.origin).parent.glob("libjax_common.*"):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            texts = (lost_hosts._FATAL, lost_hosts._NOT_CONNECTED, b"stopped sending heartbeats):")
            contents.append([content.find(text) >= 0 for text in texts])
    assert contents == [[True, True, True]]


def test_the_hosts_flag():
    assert parse_hosts("auto") == (None, None, None)
    assert parse_hosts("10.0.0.1:1234,4,0") == ("10.0.0.1:1234", 4, 0)
    for word in ("", "x", "here,2,0", "here:1,2,2", "here:1,0,0", "here:1,2"):
        with pytest.raises(InputError, match="must be auto, alone, or ADDRESS"):
            parse_hosts(word)
