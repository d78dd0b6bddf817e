"""Trains public implementations on the batches of a part of the study, and scores them on its text.

    make peers
    python -m studies.quality.train_peers --workdir=runs/study --corpus=runs/study/data --out=runs/study/results

Each peer is compared with our model of the same paper in the study's part "peers". Both have as many parameters, within
3 %, the same batches in the same order, and AdamW with the same settings and schedule. The peer is trained at half our
rate, at our rate and at twice our rate, and all three are reported. Our rate was tuned and must be among the rates in
OUT. PEER/our_values examines a difference: it starts from initial values like ours, at our rate. The lines of peers are
written with ours, so that the study's tables (python -m studies.quality) have them.
"""

import argparse
import json
import pathlib
import signal
import subprocess
from typing import Any, NamedTuple

import numpy as np

from benchmarks.lib.peers import MOST_UNEQUAL, add_python, check_python, peer_shape
from flash_lm.cli.huge_pages import user_environment
from flash_lm.cli.run import run
from flash_lm.cli.types import split_words
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse
from flash_lm.data.batches import evaluation_batches
from flash_lm.data.share import single_host_share
from flash_lm.errors import InputError, RunError
from flash_lm.runs.jsonl import Line
from flash_lm.runs.provenance import hash_of_files, provenance
from flash_lm.sweeps.jobs import Job, JobFolder, finish, make_jobs, study_hash
from flash_lm.training.evaluation import block_sums, compute_scores
from flash_lm.training.schedule import learning_rate
from flash_lm.training.setup import Experiment, build_experiment
from studies.quality import config as study
from studies.quality.implementations import peer_rates
from studies.quality.run import BLOCKS, Trunk, list_trunks, read_best_rates, schedules

WORKER = pathlib.Path(__file__).with_name("train_peers_worker.py")

PART = "peers"
# peer -> ours
PEERS = {
    "gpt2": "transformer",
    "gpt2/our_values": "transformer",
    "llama": "transformer_plus_plus",
    "llama/our_values": "transformer_plus_plus",
    "flash_pytorch": "flash/untied",
    "flash_pytorch/our_values": "flash/untied",
}
SPLITS = ("validation", "test")
_NO_TARGET = -100


class PeerRun(NamedTuple):
    """A run of a peer."""

    peer: str
    ours: Trunk
    rate: float

    @property
    def name(self) -> str:
        """Name of its folder and file."""
        return f"{PART}_{self.peer}_{self.rate:g}_seed_{self.ours.seed}".replace("/", "_")

    @property
    def about(self) -> Line:
        """The keys that identify its lines."""
        run = f"{self.peer} at {self.rate:g}"
        who = {"peer": self.peer, "beside": self.ours.model, "run": run}
        return {"part": PART, **who, "seed": self.ours.seed, "rate": self.rate}

    def job(self, texts: str, python: pathlib.Path) -> Job:
        """Returns its job; the hash covers our config, except `residual_init`, which does not change a peer.

        Args:
            texts: hash of all texts.
            python: interpreter of the peers' environment.
        """
        config = apply_changes(self.ours.config, {"model.residual_init": "as_init"})
        job_hash = study_hash(config, texts, self.peer, self.rate)
        return Job(self.name, self.about, job_hash, lambda folder, should_stop: train_and_score(self, python, folder))


def list_runs(peers: list[str], trunks: list[Trunk], out: pathlib.Path) -> list[PeerRun]:
    """Lists the runs of each peer, those at our rates first.

    Raises:
        InputError: unknown peer, or our rate is missing.
    """
    if unknown := [name for name in peers if name not in PEERS]:
        raise InputError(f"--peers={' '.join(unknown)}: must be among {', '.join(PEERS)}")
    ours, tuned = {trunk.model: trunk for trunk in trunks}, read_best_rates(out)
    ours_of_peer = {peer: ours[PEERS[peer]] for peer in peers}
    if missing := [trunk.tuned_as for trunk in ours_of_peer.values() if trunk.tuned_as not in tuned]:
        raise InputError(f"no rate of {', '.join(missing)} in {out}/rates: run python -m studies.quality --workdir=…")
    our_rate = lambda trunk: tuned[trunk.tuned_as]["value"]
    runs = [
        PeerRun(peer, trunk, rate) for peer, trunk in ours_of_peer.items() for rate in peer_rates(peer, our_rate(trunk))
    ]
    return sorted(runs, key=lambda run: run.rate != our_rate(run.ours))


def ask_worker(python: pathlib.Path, folder: pathlib.Path, question: Line) -> Line:
    """Runs the peer's worker on a question and returns its answer; progress goes to the terminal.

    Raises:
        RunError: the worker failed.
    """
    (folder / "question.json").write_text(json.dumps(question), encoding="utf-8")
    file = folder / "answer.json"
    file.unlink(missing_ok=True)
    done = subprocess.run([python, WORKER, folder], env=user_environment())
    if not file.exists():
        raise RunError(f"{question['peer']}: its process ended with code {done.returncode}")
    answer = json.loads(file.read_text(encoding="utf-8"))
    if "error" in answer:
        raise RunError(f"{question['peer']}: {answer['error']}")
    return answer


def write_batches(experiment: Experiment, steps: int, folder: pathlib.Path) -> dict[str, float]:
    """Writes the batches of training and of the splits to score; returns the bytes of text of each split's targets."""
    training = experiment.training_batches(experiment.share())
    _write(folder / "train.npz", [next(training) for _ in range(steps)])
    share, per_token = (
        single_host_share(experiment.config.data.batch_size),
        experiment.corpus.tokenizer.bytes_per_token(),
    )
    text_bytes = {}
    for split in SPLITS:
        chosen = list(evaluation_batches(experiment.evaluation_rows(split), share))
        _write(folder / f"{split}.npz", chosen)
        text_bytes[split] = float(sum((per_token[x["targets_BxL"]] * x["loss_mask_BxL"]).sum() for x in chosen))
    return text_bytes


def _write(file: pathlib.Path, chosen: list[dict[str, np.ndarray]]) -> None:
    targets = [np.where(x["loss_mask_BxL"] > 0, x["targets_BxL"], _NO_TARGET) for x in chosen]
    inputs = np.stack([x["inputs_BxL"] for x in chosen])
    np.savez(file, inputs_NxBxL=inputs, targets_NxBxL=np.stack(targets).astype(np.int32))


def train_and_score(peer_run: PeerRun, python: pathlib.Path, folder: pathlib.Path) -> list[Line]:
    """Trains and scores a run of a peer; returns a line per split, or one that says why it failed.

    Raises:
        RunError: the peer cannot be built or trained, or has another size.
    """
    # The worker gets our batches, the rate of every step, and AdamW's settings.
    ((name, changes),) = schedules(peer_run.ours, peer_run.rate, folder).items()
    experiment = build_experiment(parse(apply_changes(peer_run.ours.config, changes)))
    config, train = experiment.config, experiment.config.train
    schedule = learning_rate(train)
    question: Line = {
        "peer": peer_run.peer,
        "shape": peer_shape(config),
        "parameters": experiment.model.parameter_count(),
        "most_unequal": MOST_UNEQUAL,
        "seed": config.seed,
        "splits": SPLITS,
        "rates": np.array([schedule(step) for step in range(train.steps)], float).tolist(),
        **{key: getattr(train, key) for key in ("b1", "b2", "eps", "weight_decay", "clip")},
    }
    folder.mkdir(parents=True, exist_ok=True)
    count = write_batches(experiment, train.steps, folder)
    answer = ask_worker(python, folder, question)
    if "failed" in answer:
        return [{**peer_run.about, "failed": answer["failed"]}]
    # Lines like those of our runs.
    about: Line = {
        "task": config.task,
        "family": peer_run.peer,
        "parameters": answer["parameters"],
        "corpus": experiment.corpus.name,
        "corpus_hash": experiment.corpus.fingerprint[:12],
        "pack": config.data.pack,
        "length": config.data.length,
        "step": train.steps,
        "trained_length": config.data.length,
        "batch_tokens": config.data.tokens_per_batch,
        "share": float(name),
        "peer_versions": answer["peer_versions"],
        **provenance(answer["device"]),
    }
    return [{**about, **_scores(answer[split], count[split]), "split": split, **peer_run.about} for split in SPLITS]


def _scores(sums: Line, count: float) -> Line:
    """Computes scores like ours from the sums of each batch and the bytes of all targets."""
    of_batches = {name: [np.array(x, float) for x in sums[name]] for name in ("nll", "tokens")}
    blocks = {f"{name}_blocks": block_sums(values, BLOCKS) for name, values in of_batches.items()}
    return compute_scores({name: float(sum(x)) for name, x in of_batches.items()} | {"bytes": count} | blocks)


def main(argv: list[str]) -> None:
    """Makes the runs of peers that OUT does not have; several processes may share them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--peers", default=" ".join(PEERS), help="separated by spaces; default: all")
    parser.add_argument("--corpus", required=True, type=pathlib.Path, help="what studies/quality/data.py has written")
    parser.add_argument("--workdir", required=True, type=pathlib.Path, help="folder for runs in progress")
    parser.add_argument("--out", required=True, type=pathlib.Path, help="folder of the study's lines")
    add_python(parser)
    arguments = parser.parse_args(argv)
    check_python(arguments.python)
    config: Any = study.get_config()
    config.data.mixture = study.mixture(arguments.corpus)
    trunks = list_trunks(config, [part for part in study.get_parts() if part.name == PART])
    texts = hash_of_files(arguments.corpus, (".jsonl", ".parquet"))
    jobs = [x.job(texts, arguments.python) for x in list_runs(split_words(arguments.peers), trunks, arguments.out)]
    job_folder = JobFolder(arguments.out, arguments.workdir, lambda: False)
    finish(make_jobs(lambda: jobs, job_folder), job_folder)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a worker ends with this process
    run(main)
