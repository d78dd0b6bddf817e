"""Where a run starts: at its newest checkpoint, at its parent's, or at the first step."""

import dataclasses
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from flash_lm.data.share import Share
from flash_lm.data.splits import Splits
from flash_lm.errors import InputError
from flash_lm.runs.run_name import RunName
from flash_lm.training import checkpoint_read
from flash_lm.training.checkpoint_write import Checkpoints
from flash_lm.training.init_from import initial_state
from flash_lm.training.setup import Experiment, Setup
from flash_lm.training.train_state import TrainState, init_state


@dataclasses.dataclass(frozen=True)
class Start:
    """Where a run starts or continues.

    Attributes:
        experiment: the experiment, with the constants of the checkpoint.
        state: the checkpoint's state, or the first one.
        facts: the checkpoint's facts; empty for a new run.
        share: what this host reads of a batch.
        place: position in a streamed corpus.
        message: a sentence if it starts from another run; its first state is then saved, since the other may change.
    """

    experiment: Experiment
    state: TrainState
    facts: checkpoint_read.Facts
    share: Share
    place: dict[str, Any] | None
    message: str | None


def find_start(experiment: Experiment, checkpoints: Checkpoints | None, parent: RunName | None) -> Start:
    """The newest checkpoint of a run, or that of a new branch's parent, or a new state.

    Raises:
        InputError: no intact checkpoint, another corpus, or a stream on another number of hosts; nothing is written.
    """
    share, message = experiment.share(), None
    if checkpoints is not None:
        state, facts = checkpoints.restore_newest(experiment.abstract)
    elif parent is not None:
        state, facts = checkpoint_read.restore(parent, experiment.abstract)
    else:
        return _first(experiment, share)
    _check_corpus(facts, experiment.corpus)
    if state.constants is None:
        everywhere = NamedSharding(experiment.mesh, PartitionSpec())
        state = dataclasses.replace(state, constants=jax.device_put(experiment.model.constants, everywhere))
    if checkpoints is None and parent is not None:
        step, steps = int(state.step), experiment.config.train.steps
        if step >= steps:
            raise InputError(f"{parent} has done {step} steps, and train.steps={steps} must be more: raise it")
        facts |= {"parent": checkpoint_read.identity(parent, step, state.params, facts)}
        message = f"branching from {parent} at step {step}"
    experiment = experiment.with_constants(state.constants)
    return Start(experiment, state, facts, share, _place(facts.get("places"), share), message)


def _first(experiment: Experiment, share: Share) -> Start:
    """The first step, with new parameters or another model's."""
    state = new_state(experiment)
    if not experiment.config.train.init_from:
        return Start(experiment, state, {}, share, None, None)
    initial = initial_state(experiment, state)
    experiment = experiment.with_constants(initial.state.constants)
    return Start(experiment, initial.state, {"parent": initial.parent}, share, None, initial.message)


def _check_corpus(facts: checkpoint_read.Facts, corpus: Splits) -> None:
    if corpus.fingerprint != facts["corpus"]:
        raise InputError(
            f"corpus {corpus.name} is not the one that the run began with: its content has changed; restore it, or "
            f"choose another --workdir"
        )
    checkpoint_read.check_tokenizer(facts, corpus.tokenizer)


def _place(places: list[Any] | None, share: Share) -> Any:
    """The position of this host in a streamed corpus."""
    if not places:
        return None
    if len(places) != share.groups:
        raise InputError(
            f"the run streams its corpus on {len(places)} hosts, but here are {share.groups}: use the same number, or "
            f"set --config.data.streaming=false and choose another --workdir"
        )
    return places[share.group]


def new_state(setup: Setup) -> TrainState:
    """The state before the first step; each array is created with its sharding."""
    shardings = jax.tree.map(lambda x: x.sharding, setup.abstract)

    def init() -> TrainState:
        return init_state(setup.model, setup.optimizer, setup.config.carried_rows, setup.config.train.ema > 0)

    return jax.jit(init, out_shardings=shardings)()
