"""The stages from a pretrained Transformer to a model with linear attention: convert, transfer, choose, distil, train.

WORKDIR/linear    the student: the teacher's weights in another family, with new parameters
WORKDIR/transfer  its new parameters learn the outputs of the teacher's attention, layer by layer
WORKDIR/mixed     the layers that need it most are softmax again
WORKDIR/distil    attention learns the teacher's distribution over next tokens
WORKDIR/plain     all parameters learn the text, without the teacher
"""

import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from flash_lm.config.experiment import parse
from flash_lm.data.slices import SomeRows
from flash_lm.data.token_cache import KnownCorpus
from flash_lm.errors import InputError, Stopped
from flash_lm.inference.convert import convert_model, describe, fill_from_source
from flash_lm.inference.model import load_model
from flash_lm.layers.parameter import parameter_name
from flash_lm.linearising.importance import layer_divergences, most_important, pattern_of
from flash_lm.linearising.stages import STAGES
from flash_lm.runs.hosts import gather_from_hosts, is_first
from flash_lm.runs.json_file import load_json
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training.export_folder import write_json
from flash_lm.training.hub import download
from flash_lm.training.setup import build_experiment
from flash_lm.training.train_loop import train

_RECORD, _LAYERS = "linearise.json", "layers.json"


@dataclasses.dataclass(frozen=True)
class Linearisation:
    """What a user asks for.

    Attributes:
        model: name of the teacher.
        workdir: folder of all stages.
        config: config of a run that starts from the teacher, with the user's keys.
        given: names of the user's keys.
        softmax_layers: number of layers that stay softmax.
        rows: sequences of the validation split in which layers are compared.
        tokens: to train on, by stage.
        rates: peaks of the learning rate, by stage.
    """

    model: str
    workdir: pathlib.Path
    config: Any
    given: frozenset[str]
    softmax_layers: int
    rows: int
    tokens: Mapping[str, int]
    rates: Mapping[str, float]

    def record(self) -> dict[str, Any]:
        """What decides the result, as JSON: a folder belongs to one such record."""
        # Keys of data and training are checked by the runs of the stages.
        keys = {k: x for k, x in _flat(self.config).items() if k in self.given and k.startswith("model.")}
        rest = dataclasses.asdict(self) | {"workdir": None, "config": keys, "given": None}
        return json.loads(json.dumps(rest, default=list))


def linearise(asked: Linearisation, should_stop: Callable[[], bool]) -> pathlib.Path:
    """Runs all stages, or goes on where they stopped; returns the folder of the last one.

    Raises:
        InputError: the folder belongs to another command, or the model cannot be converted.
        Stopped: `should_stop` returned true; all is saved.
    """
    _begin(asked)
    student = _convert(asked, asked.model, "linear", asked.config.model.family)
    if asked.tokens["transfer"]:
        taken = sorted(_names(asked.model) & _names(str(student)))
        frozen = tuple(f"^{re.escape(name)}$" for name in taken)
        student = _train(asked, "transfer", student, should_stop, {"train.freeze": frozen})
    if asked.softmax_layers:
        teacher_family = _folder(asked.model).config.model.family
        kept = _softmax_layers(asked, student, should_stop)
        pattern = pattern_of(kept, asked.config.model.num_layers, (teacher_family, asked.config.model.family))
        student = _convert(asked, str(student), "mixed", teacher_family, pattern)
    for stage in ("distil", "plain"):
        if asked.tokens[stage]:
            student = _train(asked, stage, student, should_stop)
    return student


def stage_configs(asked: Linearisation) -> dict[str, Any]:
    """The configs of the training stages for a plan: as they will be, but with new parameters.

    With layers that stay softmax the plan is for every n-th of them.
    """
    model, layers = load_model(download(asked.model)).config.model, asked.config.model.num_layers
    pattern: tuple[str, ...] = ()
    if asked.softmax_layers:
        every = [round((i + 0.5) * layers / asked.softmax_layers) for i in range(asked.softmax_layers)]
        pattern = pattern_of(every, layers, (model.family, asked.config.model.family))
    configs = {}
    for stage in STAGES:
        if asked.tokens[stage]:
            config = _stage_config(asked, stage, None)
            config.train.init_from = asked.model  # for its tokenizer
            config.model.pattern = () if stage == "transfer" else pattern
            configs[stage] = fill_from_source(config, model, asked.given | {"model.pattern"})
    return configs


def _begin(asked: Linearisation) -> None:
    """Records what is asked for, or checks that the folder was made for it."""
    path, record = asked.workdir / _RECORD, asked.record()
    # As the first host sees the folder, so that all hosts go the same way.
    known = gather_from_hosts(load_json(path) if path.exists() else None)[0]
    is_used = gather_from_hosts(asked.workdir.exists() and any(asked.workdir.iterdir()))[0]
    if known is None and is_used:
        raise InputError(f"{asked.workdir} is not empty, and not of this command: give another --workdir")
    if other := [key for key, value in record.items() if known and known.get(key) != value]:
        raise InputError(
            f"{asked.workdir} was begun with other values of {', '.join(other)}: see {_RECORD} there, or give another "
            f"--workdir"
        )
    if known is None:
        _write(path, record)


def _convert(
    asked: Linearisation, source: str, folder: str, family: str, pattern: tuple[str, ...] = ()
) -> pathlib.Path:
    """Converts a model to the family of the student, or to a pattern; the folder of the result."""
    out, name = asked.workdir / folder, download(source)
    if not _exists(out):
        config = _with_model(asked, _folder(source).config)
        config.model.update(family=family, pattern=pattern)
        given = asked.given | {"model.family", "model.pattern"}
        converted = convert_model(name, config, given, out)
        if is_first():
            print(describe(name, out, converted))
        gather_from_hosts(None)  # the first host has written it
    return out


def _train(
    asked: Linearisation,
    stage: str,
    start: pathlib.Path,
    should_stop: Callable[[], bool],
    keys: Mapping[str, Any] | None = None,
) -> pathlib.Path:
    folder = asked.workdir / stage
    if is_first():
        print(f"{stage}: {STAGES[stage].about}, {asked.tokens[stage]:,} tokens")
    config = _stage_config(asked, stage, start)
    config.update_from_flattened_dict(dict(keys or {}))
    if not train(config, folder, should_stop):
        raise Stopped
    return folder


def _stage_config(asked: Linearisation, stage: str, start: pathlib.Path | None) -> Any:
    """The config of a stage: the user's, with the keys of the stage."""
    config = asked.config.copy_and_resolve_references()
    if start is not None:
        config.model = _folder(str(start)).config.model
        config.model.param_dtype = asked.config.model.param_dtype  # small updates would be lost in bfloat16
    config.train.update(
        init_from=None if start is None else str(start),
        teacher=asked.model,
        steps=None,
        tokens=asked.tokens[stage],
        learning_rate=asked.rates[stage],
    )
    config.update_from_flattened_dict(dict(STAGES[stage].keys))
    return config


def _softmax_layers(asked: Linearisation, student: pathlib.Path, should_stop: Callable[[], bool]) -> list[int]:
    """The layers that stay softmax: those where the student's token mixer alone changes the distribution most."""
    path = asked.workdir / _LAYERS
    if _exists(path):
        return load_json(path)["softmax"]
    teacher, other = load_model(download(asked.model)), load_model(student)
    experiment = build_experiment(parse(_stage_config(asked, "distil", student)), KnownCorpus(other.tokenizer))
    rows = experiment.evaluation_rows("validation")
    chosen = SomeRows(rows, range(0, len(rows), max(len(rows) // asked.rows, 1))[: asked.rows])
    divergences = layer_divergences(teacher, other, chosen, should_stop=should_stop)
    kept = most_important(divergences, asked.softmax_layers)
    if is_first():
        print(f"KL in nats with {asked.config.model.family} in one layer, on {len(chosen)} sequences:")
        print(", ".join(f"{layer}: {value:.4f}" for layer, value in enumerate(divergences)))
        print(f"softmax stays in layers {', '.join(map(str, kept))}")
    _write(path, {"divergences": divergences, "softmax": kept, "sequences": len(chosen)})
    return kept


def _with_model(asked: Linearisation, raw: Any) -> Any:
    """The config of a model's folder with the user's keys of the model."""
    config, flat = raw.copy_and_resolve_references(), _flat(asked.config)
    config.update_from_flattened_dict({k: v for k, v in flat.items() if k in asked.given and k.startswith("model.")})
    return config


def _folder(source: str) -> RunFolder:
    return RunFolder(download(source).workdir)


def _names(source: str) -> set[str]:
    """The names of the parameters of a model."""
    function = load_model(download(source)).model
    params = function.get_params(function.abstract)
    return {parameter_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)}


def _exists(path: pathlib.Path) -> bool:
    """Whether the first host sees a path: all hosts must go the same way."""
    return gather_from_hosts(path.exists())[0]


def _write(path: pathlib.Path, content: Any) -> None:
    """Writes a JSON file that is there completely or not at all; other hosts wait for the first."""
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".part")
        write_json(partial, content)
        partial.replace(path)
    gather_from_hosts(None)


def _flat(config: Any) -> dict[str, Any]:
    return flatten_dict(config.to_dict(), sep=".")
