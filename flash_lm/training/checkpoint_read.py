"""Lists and restores the checkpoints of a run, without disturbing a run in progress.

Each host reads its shards alone and then reports whether it could, so that no host waits for one that has failed.
"""

import contextlib
import json
import logging
import math
import pathlib
import typing
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from etils import epath

from flash_lm.data.token_cache import KnownCorpus
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import LAST_FILE, load_tokenizer
from flash_lm.errors import InputError, first_line
from flash_lm.runs.hosts import gather_from_hosts
from flash_lm.runs.json_file import load_json
from flash_lm.runs.run_folder import RunFolder, is_export
from flash_lm.runs.run_name import BEST, NEWEST, RunName
from flash_lm.runs.saved_steps import checkpoint_folder, saved_steps
from flash_lm.runs.storage import is_complete
from flash_lm.training.export_folder import check_facts, read_export, read_origin
from flash_lm.training.fingerprint import fingerprint
from flash_lm.training.hub import hub_name
from flash_lm.training.train_state import Params, TrainState

_log = logging.getLogger(__name__)
CHECKSUMS = "checksums"  # key of the facts
ITEMS = ("state", "facts")  # folders of a checkpoint
Facts = dict[str, Any]
Tree = dict[str, Any]  # step, params, opt_state, constants, carried and ema, or some of them
Result = TypeVar("Result")


def checkpoint_steps(workdir: pathlib.Path) -> list[int]:
    """Steps of all checkpoints, intact or not, as the first host sees them; in ascending order."""
    return gather_from_hosts(saved_steps(workdir))[0]


def restore(
    name: RunName,
    abstract: TrainState,
    damaged: dict[int, str] | None = None,
    run: RunFolder | None = None,
) -> tuple[TrainState, Facts]:
    """Restores a train state and its facts, verified by checksums.

    Args:
        name: name of the checkpoint; if the newest is damaged, the newest intact one is used.
        abstract: shapes, dtypes and shardings of the state.
        damaged: is filled with the steps that are not intact, and why.
        run: the folder of that name, if it has been read already.

    Raises:
        InputError: no such checkpoint, or no intact one for this model and optimizer.
    """
    run, damaged = run or RunFolder(name.workdir), {} if damaged is None else damaged
    _, tree, facts = _restore_tree(name, run, state_tree(abstract), damaged)
    carried = abstract.carried and abstract.carried.from_tree(tree["carried"])
    constants, ema = tree.get("constants", {}), tree.get("ema")
    return TrainState(tree["step"], tree["params"], tree["opt_state"], constants, carried, ema), facts


def restore_params(
    name: RunName, run: RunFolder, params: Params, constants: Params
) -> tuple[int, Params, Params, Facts]:
    """Restores step, parameters, constants and facts of a checkpoint or an export, without the optimizer's state.

    Args:
        name: name of the checkpoint or of an exported model; with `ema`, the average of the parameters is read.
        run: its folder.
        params: shapes, saved dtypes and shardings.
        constants: the same for the constants (random and not trained); empty: the model has none.

    Raises:
        InputError: as `restore`; or the name asks for an average that the run does not keep.
    """
    # An export: one state, read from its safetensors.
    if is_export(name.workdir):
        if name.suffix:
            raise InputError(f"{name.workdir} is an exported model, which has one state: leave {name.suffix} out")
        read = _run_on_all_hosts(partial(read_export, name.workdir, params, constants))
        if isinstance(read, str):
            raise InputError(f"{name.workdir} is damaged ({read}): export the run again")
        return read
    # A checkpoint: only the subtrees that are asked for are read.
    if name.ema and not run.config.train.ema:
        raise InputError(f"{name.workdir} keeps no average of its parameters (train.ema is off): leave @ema out")
    part = "ema" if name.ema else "params"
    step, tree, facts = _restore_tree(name, run, {part: params} | ({"constants": constants} if constants else {}), {})
    return step, tree[part], tree.get("constants", {}), facts


def known_corpus(run: RunFolder, path: str | None) -> KnownCorpus | None:
    """The tokenizer and the corpus fingerprint that a run has recorded; None: the run has not begun.

    The fingerprint is left out if `path` is not the run's data.path: the corpus must then be read again.
    """
    saved_steps, folder, fingerprint = checkpoint_steps(run.path), run.path / "tokenizer", None
    if not is_complete(folder, LAST_FILE):
        return None
    for step in saved_steps if run.config.data.path == path else ():
        with contextlib.suppress(OSError, ValueError, KeyError):  # reading the checkpoint will raise the error
            fingerprint = _load_facts(run.path, step)["corpus"]
    return KnownCorpus(load_tokenizer(folder), fingerprint)


def check_tokenizer(facts: Facts, tokenizer: Tokenizer) -> None:
    """Checks that a checkpoint was trained with this tokenizer, if it says with which one.

    Raises:
        InputError: the tokenizer has changed.
    """
    if facts["tokenizer"] != tokenizer.fingerprint:
        raise InputError(
            f"the folder tokenizer/ of the run holds another tokenizer ({tokenizer.vocab_size} tokens) than the one "
            f"that it was trained with: restore the original"
        )


def identity(name: RunName, run: RunFolder, step: int, params: Params, facts: Facts) -> Facts:
    """The record of a parent checkpoint in the facts of its child; it includes the parent's own parent, if any."""
    origin = read_origin(name.workdir) if is_export(name.workdir) else {}
    return {
        "run": origin.get("run", str(name)),
        "step": step,
        "config_hash": origin.get("config_hash") or run.hash,
        "params": fingerprint(params),
        "corpus": facts.get("corpus"),
        **({"hub": copy} if (copy := hub_name(name.workdir)) else {}),
    } | {key: facts[key] for key in ("code", "parent") if key in facts}


def state_tree(state: TrainState) -> Tree:
    """The state as a dict, as it is saved: constants, carried state and average are left out if empty."""
    tree = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    tree |= {"carried": state.carried.tree()} if state.carried else {}
    tree |= {"ema": state.ema} if state.ema is not None else {}
    return tree | ({"constants": state.constants} if state.constants else {})


def checksums(tree: Tree) -> dict[str, str]:
    """Checksums of a saved state: of the parameters, constants and average, and of all the rest."""
    sums = {name: fingerprint(tree[name]) for name in ("params", "constants", "ema") if name in tree}
    if "opt_state" in tree:
        sums["rest"] = fingerprint({name: tree[name] for name in ("step", "opt_state", "carried") if name in tree})
    return sums


def facts_checksum(facts: Facts) -> str:
    """Checksum of the facts."""
    return f"{zlib.crc32(json.dumps(facts, sort_keys=True).encode()):08x}"


def no_checkpoint(workdir: pathlib.Path) -> InputError:
    """The error for a run without checkpoints."""
    return InputError(f"{workdir} has no checkpoint yet: train it first")


def no_intact_checkpoint(workdir: pathlib.Path, damaged: dict[int, str]) -> InputError:
    """The error for a run whose checkpoints are all damaged, with the reasons."""
    reasons = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
    return InputError(
        f"no checkpoint in {checkpoint_folder(workdir)} is intact and of this config ({reasons}): restore a copy, or "
        f"choose another --workdir"
    )


def _restore_tree(name: RunName, run: RunFolder, abstract: Tree, damaged: dict[int, str]) -> tuple[int, Tree, Facts]:
    """Reads the step that a name refers to, and falls back to an earlier one if the newest is damaged."""
    workdir, config = name.workdir, run.fingerprint
    while (step := _select_step(name, run, damaged)) is not None:
        read = _run_on_all_hosts(partial(_read_step, workdir, step, config, abstract))
        if not isinstance(read, str):
            tree, facts = read
            # A separate call, since checksums are computed by all hosts together.
            read = _run_on_all_hosts(partial(_verify_checksums, facts, tree))
        if not isinstance(read, str):
            return step, tree, read
        if step not in checkpoint_steps(workdir):
            continue  # a run in progress has deleted it in the meantime
        damaged[step] = read
        _log.warning("checkpoint %d is damaged, or of another config (%s)", step, read)
    raise no_intact_checkpoint(workdir, damaged) if damaged else no_checkpoint(workdir)


def _select_step(name: RunName, run: RunFolder, damaged: dict[int, str]) -> int | None:
    """The step that a name refers to; None: no such step, or only damaged ones."""
    saved_steps = checkpoint_steps(name.workdir)
    if name.which == NEWEST:
        return max((step for step in saved_steps if step not in damaged), default=None)
    if not saved_steps:
        return None
    step = _best_step(run, saved_steps) if name.which == BEST else name.which
    if step not in saved_steps:
        raise InputError(f"{name.workdir} has no checkpoint of step {step}: it has {', '.join(map(str, saved_steps))}")
    return None if step in damaged else typing.cast(int, step)


def _best_step(run: RunFolder, saved_steps: list[int]) -> int:
    """The step with the lowest train.best_metric of the checkpoints that were evaluated when saved."""
    workdir, metric, scores = run.path, run.config.train.best_metric, {}
    for step in saved_steps:
        try:
            score = load_json(checkpoint_folder(workdir) / str(step) / "metrics" / "metrics")[metric]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(score, float) and math.isfinite(score):
            scores[step] = score
    best = gather_from_hosts(min(scores, key=scores.__getitem__, default=None))[0]
    if best is None:
        raise InputError(
            f"no checkpoint of {workdir} was evaluated when it was saved, so none is the best: use "
            f"{workdir}@{saved_steps[-1]}, or make train.checkpoint_every a multiple of train.eval_every"
        )
    return best


def _load_facts(workdir: pathlib.Path, step: int) -> Facts:
    facts = load_json(checkpoint_folder(workdir) / str(step) / "facts" / "metadata")
    check_facts(facts)
    return facts


def _read_step(workdir: pathlib.Path, step: int, config: str | None, abstract: Tree) -> tuple[Tree, Facts]:
    # The facts are small, and say whether the arrays are worth reading.
    facts = _load_facts(workdir, step)
    if CHECKSUMS not in facts:
        raise ValueError("it has no checksums")
    if (facts.get("step"), facts.get("config")) != (step, config):
        raise ValueError("it was saved by another run, or at another step")
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    arguments = ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args, partial_restore=True)
    # Not through Orbax's manager, whose hosts wait for each other even if one has failed.
    return ocp.PyTreeCheckpointHandler().restore(
        epath.Path(checkpoint_folder(workdir) / str(step) / "state"), args=arguments
    ), facts


def _verify_checksums(facts: Facts, tree: Tree) -> Facts:
    """The facts without the checksums; raises ValueError if a checksum does not match."""
    expected = facts.pop(CHECKSUMS)
    actual = checksums(tree) | {"facts": facts_checksum(facts)}
    if wrong := [name for name, value in actual.items() if expected.get(name) != value]:
        raise ValueError(f"wrong checksum of {', '.join(wrong)}")
    return {name: value for name, value in facts.items() if name not in ("step", "config")}


def _run_on_all_hosts(work: Callable[[], Result]) -> Result | str:
    """Returns the result of `work`, or why it failed on some host: all hosts return the same outcome."""
    result = reason = None
    try:
        result = work()
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can make a reader raise anything
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        reason = first_line(error)
    # Every host learns whether any has failed, and reports the first one that has.
    reasons = gather_from_hosts(reason)
    if not any(reasons):
        return typing.cast(Result, result)
    number = next(i for i, text in enumerate(reasons) if text)
    return reasons[number] if len(reasons) == 1 else f"host {number}: {reasons[number]}"
