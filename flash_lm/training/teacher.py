"""The teacher of a run with `train.teacher`: a model whose outputs the run's model learns, and whose weights stay."""

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from flash_lm.config.experiment import Config
from flash_lm.config.registry import FAMILIES
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.errors import InputError
from flash_lm.families.family import common_forms
from flash_lm.layers.sublayer import Sublayer
from flash_lm.models.language_model import LanguageModel
from flash_lm.models.layer_pairs import mixer_of
from flash_lm.runs.run_folder import RunFolder
from flash_lm.runs.run_name import RunName
from flash_lm.training import checkpoint_read
from flash_lm.training.hub import download
from flash_lm.training.load_weights import config_on_mesh, model_without_weights, read_weights
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
        if load_tokenizer(self.name.workdir / "tokenizer").fingerprint != tokenizer.fingerprint:
            raise InputError(
                f"train.teacher={source} has another vocabulary than the run: start from the same model with "
                f"train.init_from, or choose a teacher with the same tokenizer"
            )
        weights = read_weights(self.name, run, *config_on_mesh(run, config))
        identity = checkpoint_read.identity(self.name, run, weights.step, weights.params, weights.facts)
        if known and known["params"] != identity["params"]:
            raise InputError(
                f"train.teacher={source} has other parameters than the teacher that the run began with: give that "
                f"one, or another --workdir"
            )
        model = self.model.replace_constants(weights.model.constants)
        return dataclasses.replace(self, model=model, params=weights.params, identity=identity)


def find_teacher(config: Config, model: ModelFunction, mesh: Mesh) -> Teacher | None:
    """The teacher of a run, without its parameters; None: it has none.

    Args:
        config: the complete config of the run.
        model: its model.
        mesh: its mesh.

    Raises:
        InputError: no such model, or the model and its teacher do not fit each other.
    """
    if not config.train.teacher:
        return None
    name = download(config.train.teacher)
    own, saved_dtype = config_on_mesh(RunFolder(name.workdir), config)
    settings = {"packed": config.data.packed, "few_targets": config.few_targets}
    _, teacher = model_without_weights(name, own, load_tokenizer(name.workdir / "tokenizer"), **settings)
    if problems := _problems(config, model.abstract, teacher.abstract):
        raise InputError.of(problems)
    shapes = jax.eval_shape(teacher.init)
    shardings = param_shardings(shapes, teacher.traits().matrix, config.mesh, mesh)
    to_shape = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, saved_dtype, sharding=sharding)
    return Teacher(name, teacher, jax.tree.map(to_shape, shapes, shardings))


def freeze_all_but_mixers(config: Config) -> Config:
    """The config of a run with teacher_loss=layers: nothing but token mixers has a gradient, or may change."""
    # Weight decay would move the other parameters, towards zero.
    others = rf"^(?!layers/sublayer_{FAMILIES[config.model.family].mixer}/)"
    train = dataclasses.replace(config.train, freeze=(*config.train.freeze, others))
    return dataclasses.replace(config, train=train)


def _problems(config: Config, model: LanguageModel, teacher: LanguageModel) -> list[str]:
    """Why a model cannot learn from this teacher."""
    source, its, length = config.train.teacher, teacher.config, config.data.length
    if not its.causal or its.head != "softmax" or its.encoder is not None:
        return [f"train.teacher={source} must be a causal model of text with the softmax head, and it is not"]
    problems = []
    if its.vocab_size != model.config.vocab_size:
        problems.append(
            f"train.teacher={source} has {its.vocab_size} words, and this model has {model.config.vocab_size}: they "
            f"need the same vocabulary"
        )
    if teacher.longest is not None and teacher.longest < length:
        problems.append(
            f"train.teacher={source} reads {teacher.longest} tokens, and data.length={length} is more: shorten the rows"
        )
    if config.data.packed and "packed" not in common_forms(its.families):
        problems.append(f"train.teacher={source} cannot separate packed documents: set data.pack=stream")
    if any(type(sublayer).penalty is not Sublayer.penalty for sublayer in model.layers.sublayers):
        problems.append(
            f"train.teacher is for models whose loss has no other term, and layers of {model.config.label} have a "
            f"penalty: choose another model.family"
        )
    if config.train.teacher_loss == "layers":
        problems += _problems_of_layers(source, model, teacher)
    return problems


def _problems_of_layers(source: str, model: LanguageModel, teacher: LanguageModel) -> list[str]:
    """Why the layers of a model cannot be compared with those of its teacher at the same places."""
    if model.config.pattern or teacher.config.pattern:
        return ["train.teacher_loss=layers needs models without model.pattern: convert the layers after it"]
    problems = [
        f"train.teacher_loss=layers needs model.{key}={teacher.config.get(key)}, as the teacher has, and it is "
        f"{model.config.get(key)}"
        for key in ("num_layers", "model_dim")
        if teacher.config.get(key) != model.config.get(key)
    ]
    for what, one in (("this model", model), (f"train.teacher={source}", teacher)):
        if mixer_of(one.layers, one.config.family).sublayer.owns_residual:
            problems.append(
                f"train.teacher_loss=layers needs token mixers that are added to the residual stream, and the layers "
                f"of {what}, {one.config.label}, replace it: use train.teacher_loss=distribution"
            )
    return problems
