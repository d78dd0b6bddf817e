"""Builds corpus, model, optimizer, mesh, and the shapes and shardings of the train state from a config."""

import dataclasses
import logging
from collections.abc import Sequence
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from flash_lm.config.experiment import Config
from flash_lm.config.registry import TASKS
from flash_lm.data.batches import FixedRows, IndexedBatches, Transform
from flash_lm.data.carried import CarriedBatches
from flash_lm.data.examples import ExampleCorpus
from flash_lm.data.labelled import cut_share
from flash_lm.data.mixture import MixedRows, split_parts
from flash_lm.data.packing import Rows
from flash_lm.data.share import Share
from flash_lm.data.splits import Splits, load_splits
from flash_lm.data.streaming import Position, StreamedBatches
from flash_lm.data.token_cache import KnownCorpus
from flash_lm.families.family import complete
from flash_lm.ops.logistics import VALUES
from flash_lm.training.checkpoint_write import attach_shardings
from flash_lm.training.optimizer import make_optimizer
from flash_lm.training.resolve import fill_from_corpus
from flash_lm.training.sharding import batch_sharding, host_share, make_mesh, state_shardings
from flash_lm.training.teacher import Teacher, find_teacher, freeze_all_but_mixers
from flash_lm.training.train_state import ModelFunction, Params, TrainState, init_state

_log = logging.getLogger(__name__)
_MILLION = 10**6


@dataclasses.dataclass(frozen=True)
class Setup:
    """Model, optimizer, mesh and teacher of a config; `abstract` has shapes, dtypes and shardings of the state."""

    config: Config
    model: ModelFunction
    optimizer: optax.GradientTransformationExtraArgs
    mesh: Mesh
    abstract: TrainState
    teacher: Teacher | None = None


@dataclasses.dataclass(frozen=True)
class Experiment(Setup):
    """A `Setup` with its corpus: everything that a run needs besides its state."""

    corpus: Splits = dataclasses.field(kw_only=True)

    def evaluation_rows(self, split: str) -> Rows:
        """The packed sequences of a split, of data.length tokens, as the function `evaluation_rows`."""
        return evaluation_rows(self.config, self.corpus, split, self.config.data.length)

    def share(self) -> Share:
        """This host's share of a batch."""
        return host_share(batch_sharding(self.mesh), self.config.data.batch_size)

    def training_batches(
        self, share: Share, start_step: int = 0, positions: Sequence[Position] = ()
    ) -> IndexedBatches | StreamedBatches | CarriedBatches:
        """This host's batches, starting at a step.

        Args:
            share: this host's share of each batch.
            start_step: step of the first batch.
            positions: the position of each stream of a streamed corpus, from the states of its batches; empty: the
                beginning, with data.streams or a stream for each group of hosts.
        """
        config, corpus = self.config, self.corpus
        settings: dict[str, Any] = {"seed": config.seed, "transform": _task_transform(config, corpus)}
        packer, length = TASKS[config.task].packer(config.data.pack), config.data.length
        # Three orders of the text: documents in order, a stream, or shuffled sequences.
        if config.train.carry_state:
            text: Any = corpus.splits["train"]
            return CarriedBatches(text, length, share, seed=config.seed, start_step=start_step)
        if corpus.stream:
            buffer = config.data.shuffle_buffer * _MILLION
            source = (corpus.stream, corpus.tokenizer, packer, length)
            streams = len(positions) or config.data.streams or share.groups
            return StreamedBatches(*source, share, buffer=buffer, streams=streams, positions=positions, **settings)
        rows = _packed_rows(config, corpus, "train", length)
        mixture = list(zip(rows.ranges, (x for _, x in config.data.mixture), strict=True)) if corpus.parts else ()
        return IndexedBatches(rows, share, start_step=start_step, mixture=mixture, **settings)

    def replace_constants(self, constants: Params) -> "Experiment":
        """The same experiment with other constants of the model, such as those of a checkpoint."""
        return dataclasses.replace(self, model=self.model.replace_constants(jax.device_get(constants)))


def evaluation_rows(config: Config, corpus: Splits, split: str, length: int) -> Rows:
    """The packed sequences of a split, of `length` tokens, transformed by the task with fixed random choices."""
    rows = _packed_rows(config, corpus, split, length)
    transform = _task_transform(config, corpus)
    return FixedRows(rows, transform) if transform else rows


def _packed_rows(config: Config, corpus: Splits, split: str, length: int) -> Any:
    """The packed sequences of a split; a mixture is packed per source, so no sequence has text of two."""
    packer, begin = TASKS[config.task].packer(config.data.pack), corpus.tokenizer.begin
    text: Any = corpus.splits[split]
    if corpus.parts:
        return MixedRows([packer(part, length, begin) for part in split_parts(text)])
    return packer(text, length, begin)


def _task_transform(config: Config, corpus: Splits) -> Transform | None:
    """The task's transformation of sequences, such as masking; None: it has none."""
    task = TASKS[config.task]
    options = (config.data[section] for section in task.sections)
    return task.rows(corpus.tokenizer, config.data, *options) if task.rows else None


def build_setup(config: Config, mesh: Mesh) -> Setup:
    """Builds model and optimizer of a complete config on a mesh; computes nothing."""
    model = ModelFunction(config.model, config.seed, packed=config.data.packed, few_targets=config.few_targets)
    teacher = find_teacher(config, model, mesh)
    if teacher and config.train.teacher_loss == "layers":
        config = freeze_all_but_mixers(config)
    optimizer = make_optimizer(config.train, model.traits())
    abstract = jax.eval_shape(lambda: init_state(model, optimizer, config.carried_rows, config.train.ema > 0))
    shardings = state_shardings(abstract, model.traits().matrix, optimizer, config.mesh, mesh)
    return Setup(config, model, optimizer, mesh, attach_shardings(abstract, shardings), teacher)


def build_experiment(config: Config, known: KnownCorpus | None = None) -> Experiment:
    """Tokenises a config's corpus if necessary, and sets up model, optimizer and mesh.

    Args:
        config: a checked config, from `parse` or `open_run`.
        known: tokenizer and corpus fingerprint of a resumed run; None: a new run.

    Raises:
        InputError: lists every problem of config and corpus.
    """
    # Raises if the model is wrong, before time is spent on tokenising.
    complete(dataclasses.replace(config.model, vocab_size=config.model.vocab_size or VALUES))

    # The corpus, and the keys of the model that follow from it.
    mesh = make_mesh(config.mesh)
    corpus = load_splits(config.data, known)
    config = fill_from_corpus(config, corpus.tokenizer, corpus.labels)

    # Examples must fit into a sequence; texts with labels may be cut.
    if isinstance(corpus, ExampleCorpus):
        for split in ("train", "validation"):  # the test split may be longer, see `evaluate --lengths`
            pack = TASKS[config.task].packer(config.data.pack)
            pack(corpus.splits[split], config.data.length, corpus.tokenizer.begin)  # raises if they do not fit
    if TASKS[config.task].labels and (share := cut_share(corpus.splits["train"], config.data.length)):
        _log.info("%.1f %% of the training texts are cut to %d tokens", 100 * share, config.data.length)
    return Experiment(**vars(build_setup(config, mesh)), corpus=corpus)
