"""The stages from a pretrained Transformer to a model with linear attention: convert, transfer, choose, distil, train.

WORKDIR/linear    the student: the teacher's weights in another family, with new parameters
WORKDIR/transfer  its new parameters learn the outputs of the teacher's attention, layer by layer
WORKDIR/mixed     the layers that need it most are softmax again
WORKDIR/distil    attention learns the teacher's distribution over next tokens
WORKDIR/plain     all parameters learn the text, without the teacher
"""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax.traverse_util import flatten_dict

from flash_lm.config.experiment import parse
from flash_lm.config.model import ModelConfig
from flash_lm.data.slices import SomeRows
from flash_lm.data.token_cache import KnownCorpus
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.errors import InputError, Stopped
from flash_lm.families.family import complete
from flash_lm.inference.convert import convert_model, describe, fill_from_source
from flash_lm.inference.model import load_model
from flash_lm.layers.parameter import parameter_name
from flash_lm.linearising.importance import layer_divergences, most_important, pattern_of
from flash_lm.linearising.stages import STAGES
from flash_lm.runs.hosts import gather_from_hosts, is_first
from flash_lm.runs.json_file import load_json
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training.checkpoint_read import fingerprint
from flash_lm.training.export_folder import write_json
from flash_lm.training.hub import download
from flash_lm.training.load_weights import model_without_weights
from flash_lm.training.setup import build_experiment
from flash_lm.training.train_loop import train
from flash_lm.training.train_state import ModelFunction

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


def linearise(asked: Linearisation, should_stop: Callable[[], bool]) -> pathlib.Path:
    """Runs all stages, or goes on where they stopped; returns the folder of the last one.

    Raises:
        InputError: something is wrong that can be known before, and nothing is written; or the folder was begun with
            another teacher or other keys.
        Stopped: `should_stop` returned true; the same call goes on.
    """
    family, taken = _check(asked)
    _begin(asked)
    student = _convert(asked, asked.model, "linear", asked.config.model.family)
    if asked.tokens["transfer"]:
        frozen = tuple(f"^{re.escape(name)}$" for name in sorted(taken))
        student = _train(asked, "transfer", student, should_stop, {"train.freeze": frozen})
    if asked.softmax_layers:
        kept = _softmax_layers(asked, student, should_stop)
        pattern = pattern_of(kept, asked.config.model.num_layers, (family, asked.config.model.family))
        student = _convert(asked, str(student), "mixed", family, pattern)
    for stage in ("distil", "plain"):
        if asked.tokens[stage]:
            student = _train(asked, stage, student, should_stop)
    return student


def stage_configs(asked: Linearisation) -> dict[str, Any]:
    """The configs of the training stages for a plan: as they will be, but with new parameters.

    With layers that stay softmax the plan is for layers at equal distances.
    """
    model, layers = _read(asked.model)[0], asked.config.model.num_layers
    pattern: tuple[str, ...] = ()
    if asked.softmax_layers:
        kept = [int((i + 0.5) * layers / asked.softmax_layers) for i in range(asked.softmax_layers)]
        pattern = pattern_of(kept, layers, (model.family, asked.config.model.family))
    configs = {}
    for stage in STAGES:
        if asked.tokens[stage]:
            config = _stage_config(asked, stage, None)
            config.train.init_from = asked.model  # for its tokenizer
            config.model.pattern = () if stage == "transfer" else pattern
            configs[stage] = fill_from_source(config, model, asked.given | {"model.pattern"})
    return configs


def _check(asked: Linearisation) -> tuple[str, set[str]]:
    """Checks all that can be known before anything is written.

    Returns:
        The teacher's family, and the names of the parameters that the student takes from it.

    Raises:
        InputError: what was asked for cannot be done.
    """
    teacher, function = _read(asked.model)
    config = asked.config.model
    if teacher.pattern:
        raise InputError(
            f"--model={asked.model} has layers of several families ({', '.join(teacher.pattern)}): give a model whose "
            f"layers are all alike"
        )
    for stage in STAGES:
        if asked.tokens[stage]:
            parse(_stage_config(asked, stage, None))  # raises, with every problem
    # The student's parameters, as the conversion will make them.
    raw = fill_from_source(_student_config(asked, asked.model, config.family), teacher, asked.given)
    theirs, ours = _shapes(function), _shapes(ModelFunction(complete(parse(raw).model), seed=0))
    taken = ours.keys() & theirs.keys()
    if asked.tokens["transfer"] and taken == ours.keys():
        raise InputError(f"{config.family} has no new parameters, so nothing to transfer: give --transfer_tokens=0")
    options = raw.model.window_linear
    reach = options.size + options.first_tokens
    if asked.tokens["transfer"] and config.family == "window_linear" and asked.config.data.length <= reach:
        raise InputError(
            f"data.length={asked.config.data.length} has no tokens beyond the window and the first tokens, {reach}: "
            f"give longer rows, or a smaller model.window_linear.size"
        )
    if other := [name for name, shape in theirs.items() if ours.get(name) != shape] if asked.softmax_layers else []:
        raise InputError(
            f"--softmax_layers={asked.softmax_layers}: {config.family} does not keep {', '.join(other)} as the teacher "
            f"has them, so its layers cannot become softmax again: give --softmax_layers=0, or another family"
        )
    return teacher.family, taken


def _begin(asked: Linearisation) -> None:
    """Records what a folder is for, or checks that it was begun for the same."""
    path = asked.workdir / _RECORD
    keys = {k: x for k, x in _flat(asked.config).items() if k in asked.given and k.startswith("model.")}
    record = {"teacher": _fingerprint(asked), "seed": asked.config.seed, **{k: repr(x) for k, x in keys.items()}}
    # As the first host sees the folder, so that all hosts go the same way.
    known = gather_from_hosts(load_json(path) if path.exists() else None)[0]
    names = [one.name for one in asked.workdir.iterdir()] if asked.workdir.is_dir() else []
    used = gather_from_hosts([name for name in names if name != _RECORD and not name.startswith(".")])[0]
    if known is None and used:
        raise InputError(f"{asked.workdir} is not empty, and not of this command: give another --workdir")
    before = known or {}
    if other := [key for key in record.keys() | before.keys() if used and before.get(key) != record.get(key)]:
        raise InputError(
            f"{asked.workdir} was begun with other values of {', '.join(sorted(other))}: give those, or another "
            f"--workdir"
        )
    if not used:  # nothing was made yet
        _write(path, record)


def _convert(
    asked: Linearisation, source: str, folder: str, family: str, pattern: tuple[str, ...] = ()
) -> pathlib.Path:
    """Converts a model to the family of the student, or to a pattern; the folder of the result."""
    out, name = asked.workdir / folder, download(source)
    if not _exists(out):
        given = asked.given | {"model.family", "model.pattern"}
        config = _student_config(asked, source, family, pattern)
        converted = convert_model(name, config, given, out, asked.config.mesh.shape)
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
    """Trains a stage, or what is left of it; the folder of its run."""
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
    known = gather_from_hosts(load_json(path) if path.exists() else None)[0]
    if known is not None:
        if len(known["softmax"]) != asked.softmax_layers:
            raise InputError(
                f"{path} has {len(known['softmax'])} softmax layers, and --softmax_layers={asked.softmax_layers}: give "
                f"as many, or another --workdir"
            )
        return known["softmax"]
    mesh = asked.config.mesh.shape
    teacher, other = load_model(download(asked.model), mesh_shape=mesh), load_model(student, mesh_shape=mesh)
    experiment = build_experiment(parse(_stage_config(asked, "distil", student)), KnownCorpus(other.tokenizer))
    rows = experiment.evaluation_rows("validation")
    chosen = SomeRows(rows, range(0, len(rows), max(len(rows) // asked.rows, 1))[: asked.rows])
    # All hosts stop, if one of them is asked to.
    one_should_stop = lambda: any(gather_from_hosts(should_stop()))
    divergences = layer_divergences(teacher, other, chosen, should_stop=one_should_stop)
    kept = most_important(divergences, asked.softmax_layers)
    if is_first():
        print(f"KL in nats with {asked.config.model.family} in one layer, on {len(chosen)} sequences:")
        print(", ".join(f"{layer}: {value:.4f}" for layer, value in enumerate(divergences)))
        print(f"softmax stays in layers {', '.join(map(str, kept))}")
    _write(path, {"divergences": divergences, "softmax": kept, "sequences": len(chosen)})
    return kept


def _student_config(asked: Linearisation, source: str, family: str, pattern: tuple[str, ...] = ()) -> Any:
    """The config of a model's folder in another family or pattern, with the user's keys of the model."""
    config, flat = _folder(source).config.copy_and_resolve_references(), _flat(asked.config)
    config.update_from_flattened_dict({k: v for k, v in flat.items() if k in asked.given and k.startswith("model.")})
    config.model.update(family=family, pattern=pattern)
    config.seed = asked.config.seed
    return config


def _folder(source: str) -> RunFolder:
    return RunFolder(download(source).workdir)


def _read(source: str) -> tuple[ModelConfig, ModelFunction]:
    """The complete config of a model, and the model without its parameters."""
    name = download(source)
    config, function = model_without_weights(
        name, parse(RunFolder(name.workdir).config), load_tokenizer(name.workdir / "tokenizer")
    )
    return config.model, function


def _shapes(function: ModelFunction) -> dict[str, tuple[int, ...]]:
    """The shapes of the parameters by name."""
    leaves = jax.tree_util.tree_leaves_with_path(function.get_params(function.abstract))
    return {parameter_name(path): x.shape for path, x in leaves}


def _fingerprint(asked: Linearisation) -> str:
    """The identity of the teacher's parameters, wherever its folder is."""
    return fingerprint(load_model(download(asked.model), mesh_shape=asked.config.mesh.shape).params)


def _exists(path: pathlib.Path) -> bool:
    """Whether the first host sees a path: all hosts must go the same way."""
    return gather_from_hosts(path.exists())[0]


def _write(path: pathlib.Path, content: Any) -> None:
    """Writes a JSON file that is there completely or not at all; other hosts wait for the first."""
    if is_first():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}")
        write_json(partial, content)
        partial.replace(path)
    gather_from_hosts(None)


def _flat(config: Any) -> dict[str, Any]:
    return flatten_dict(config.to_dict(), sep=".")
