"""The teacher of a run with `train.teacher`: a model whose outputs the run's model learns, and whose weights stay."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from flash_lm.config.experiment import Config
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.errors import InputError
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import RunName
from flash_lm.training import checkpoint_read
from flash_lm.training.hub import download
from flash_lm.training.load_weights import config_on_mesh, read_weights
from flash_lm.training.resolve import fill_from_corpus
from flash_lm.training.sharding import param_shardings
from flash_lm.training.train_state import ModelFunction, Params


@dataclasses.dataclass(frozen=True)
class Teacher:
    """A teacher, perhaps without its parameters.

    Attributes:
        name: of its checkpoint or export.
        model: the model as a function of its parameters.
        abstract: shapes, dtypes and shardings of the parameters.
        params: the parameters; None: not loaded yet, see `load`.
        identity: record of the checkpoint, once it is loaded.
    """

    name: RunName
    model: ModelFunction
    abstract: Params
    params: Params | None = None
    identity: dict[str, Any] = dataclasses.field(default_factory=dict)

    def load(self, config: Config, tokenizer: Tokenizer, known: dict[str, Any] | None) -> "Teacher":
        """The teacher with its parameters.

        Args:
            config: the config of the run that it teaches.
            tokenizer: the run's tokenizer, which must be its own.
            known: the identity that the run has recorded; None: the run is new.

        Raises:
            InputError: it has another vocabulary, or other parameters than the run began with.
        """
        run, source = RunFolder(self.name.workdir), config.train.teacher
        weights = read_weights(self.name, run, *config_on_mesh(run, config))
        if weights.tokenizer.fingerprint != tokenizer.fingerprint:
            raise InputError(
                f"train.teacher={source} has another vocabulary than the run: start from the same model with "
                f"train.init_from, or choose a teacher with the same tokenizer"
            )
        identity = checkpoint_read.identity(self.name, run, weights.step, weights.params, weights.facts)
        if known and known["params"] != identity["params"]:
            raise InputError(
                f"train.teacher={source} has other parameters than the teacher that the run began with: give that "
                f"one, or another --workdir"
            )
        model = self.model.replace_constants(weights.model.constants)
        return dataclasses.replace(self, model=model, params=weights.params, identity=identity)


def find_teacher(config: Config, mesh: Mesh) -> Teacher | None:
    """The teacher of a run, without its parameters; None: it has none.

    Args:
        config: the complete config of the run.
        mesh: its mesh.

    Raises:
        InputError: no such model, or the model and its teacher do not fit each other.
    """
    if not config.train.teacher:
        return None
    name = download(config.train.teacher)
    own, saved_dtype = config_on_mesh(RunFolder(name.workdir), config)
    own = fill_from_corpus(own, load_tokenizer(name.workdir / "tokenizer"), ())
    if problems := _problems(config, own):
        raise InputError.of(problems)
    model = ModelFunction(own.model, own.seed, packed=config.data.packed, few_targets=config.few_targets)
    shapes = jax.eval_shape(model.init)
    shardings = param_shardings(shapes, model.traits().matrix, config.mesh, mesh)
    to_shape = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, saved_dtype, sharding=sharding)
    return Teacher(name, model, jax.tree.map(to_shape, shapes, shardings))


def _problems(config: Config, teacher: Config) -> list[str]:
    """Why a model cannot learn from this teacher."""
    source, model = config.train.teacher, teacher.model
    if not model.causal or model.head != "softmax" or model.encoder is not None:
        return [f"train.teacher={source} must be a causal model of text with the softmax head, and it is not"]
    problems = []
    if model.vocab_size != config.model.vocab_size:
        problems.append(
            f"train.teacher={source} has {model.vocab_size} words, and this model has {config.model.vocab_size}: they "
            f"need the same vocabulary"
        )
    if config.train.teacher_loss == "layers":
        # Each layer is compared with the teacher's at the same place.
        problems += [
            f"train.teacher_loss=layers needs model.{key}={getattr(model, key)}, as the teacher has, and it is "
            f"{getattr(config.model, key)}"
            for key in ("num_layers", "model_dim")
            if getattr(model, key) != getattr(config.model, key)
        ]
        if model.pattern or config.model.pattern:
            problems.append("train.teacher_loss=layers needs models without model.pattern: convert the layers after it")
    return problems
