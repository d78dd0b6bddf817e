"""The saved checkpoints of a run: listing them, and reading them without disturbing a run in progress.

Each host reads its part alone and then reports whether it could, so that no host waits for one that has failed.
"""

import contextlib
import json
import logging
import math
import pathlib
import re
import typing
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import orbax.checkpoint as ocp
from etils import epath

from flash_lm.data.token_cache import OwnCorpus
from flash_lm.data.tokenizer import Tokenizer
from flash_lm.data.tokenizers import load_tokenizer
from flash_lm.errors import InputError, first_line
from flash_lm.runs.hosts import of_all_hosts
from flash_lm.runs.json_file import load_json
from flash_lm.runs.run_folder import RunFolder, is_export
from flash_lm.runs.run_name import BEST, NEWEST, RunName
from flash_lm.training.export_folder import about, check_facts, read_trained
from flash_lm.training.fingerprint import fingerprint
from flash_lm.training.hub import name_of_copy
from flash_lm.training.train_state import Params, TrainState

_log = logging.getLogger(__name__)
CHECKSUMS = "checksums"  # key of the facts
PARTS = ("state", "facts")  # folders of a checkpoint
Facts = dict[str, Any]
Tree = dict[str, Any]  # step, params, opt_state, constants, carried and ema, or some of them
Done = TypeVar("Done")


def folder_of(workdir: pathlib.Path) -> pathlib.Path:
    """Where a run keeps its checkpoints; each is a folder named after its step."""
    return workdir.absolute() / "checkpoints"


def steps(workdir: pathlib.Path) -> list[int]:
    """Steps of all checkpoints, intact or not, as the first host sees them; in ascending order."""
    names = [path.name for path in folder_of(workdir).glob("*")]
    return of_all_hosts(sorted(int(name) for name in names if re.fullmatch("0|[1-9][0-9]*", name)))[0]


def restore(
    name: RunName,
    abstract: TrainState,
    damaged: dict[int, str] | None = None,
    run: RunFolder | None = None,
) -> tuple[TrainState, Facts]:
    """An intact state, with the shapes, dtypes and shardings of `abstract`, and its facts.

    Args:
        name: name of the checkpoint; if the newest is damaged, the newest intact one is used.
        abstract: shapes, dtypes and shardings of the state.
        damaged: is filled with the steps that are not intact, and why.
        run: the folder of that name, if it has been read already.

    Raises:
        InputError: no such checkpoint, or no intact one for this model and optimizer.
    """
    run, damaged = run or RunFolder(name.workdir), {} if damaged is None else damaged
    _, tree, facts = _restore(name, run, tree_of(abstract), damaged)
    carried = abstract.carried and abstract.carried.of_tree(tree["carried"])
    constants, ema = tree.get("constants", {}), tree.get("ema")
    return TrainState(tree["step"], tree["params"], tree["opt_state"], constants, carried, ema), facts


def restore_params(
    name: RunName, run: RunFolder, params: Params, constants: Params
) -> tuple[int, Params, Params, Facts]:
    """Step, parameters, constants and facts of a checkpoint, without the optimizer's state.

    Args:
        name: name of the checkpoint or of an exported model; with `ema`, the average of the parameters is read.
        run: its folder.
        params: shapes, saved dtypes and shardings.
        constants: the same for the constants (random and not trained); empty: there are none.

    Raises as `restore` does.
    """
    if is_export(name.workdir):
        if name.suffix:
            raise InputError(f"{name.workdir} is an exported model, which has one state: leave {name.suffix} out")
        read = _on_all_hosts(partial(read_trained, name.workdir, params, constants))
        if isinstance(read, str):
            raise InputError(f"{name.workdir} is damaged ({read}): export the run again")
        return read
    if name.ema and not run.config.train.ema:
        raise InputError(f"{name.workdir} keeps no average of its parameters (train.ema is off): leave @ema out")
    part = "ema" if name.ema else "params"
    step, tree, facts = _restore(name, run, {part: params} | ({"constants": constants} if constants else {}), {})
    return step, tree[part], tree.get("constants", {}), facts


def own_corpus(run: RunFolder, path: str | None) -> OwnCorpus | None:
    """What a run knows of its corpus; None: there is no run yet.

    The content counts only if `path` is its data.path: at another place the corpus must be found.
    """
    there, folder, found = steps(run.path), run.path / "tokenizer", None
    if not folder.exists():
        return None
    for step in there if run.config.data.path == path else ():
        with contextlib.suppress(OSError, ValueError, KeyError):  # reading the checkpoint will raise the error
            found = _facts(run.path, step)["corpus"]
    return OwnCorpus(load_tokenizer(folder), found)


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
    """What a run records of the checkpoint that it starts from; this includes that run's own parent, if any."""
    made = about(name.workdir) if is_export(name.workdir) else {}
    return {
        "run": made.get("run", str(name)),
        "step": step,
        "config_hash": made.get("config_hash") or run.hash,
        "params": fingerprint(params),
        "corpus": facts.get("corpus"),
        **({"hub": copy} if (copy := name_of_copy(name.workdir)) else {}),
    } | {key: facts[key] for key in ("code", "parent") if key in facts}


def tree_of(state: TrainState) -> Tree:
    """A state by name, as it is saved: without constants, carried state and average if there are none."""
    tree = {"step": state.step, "params": state.params, "opt_state": state.opt_state}
    tree |= {"carried": state.carried.tree()} if state.carried else {}
    tree |= {"ema": state.ema} if state.ema is not None else {}
    return tree | ({"constants": state.constants} if state.constants else {})


def checksums(tree: Tree) -> dict[str, str]:
    """Checksums of the parts of a saved state."""
    found = {name: fingerprint(tree[name]) for name in ("params", "constants", "ema") if name in tree}
    if "opt_state" in tree:
        found["rest"] = fingerprint({name: tree[name] for name in ("step", "opt_state", "carried") if name in tree})
    return found


def checksum_of(facts: Facts) -> str:
    """Checksum of the facts themselves."""
    return f"{zlib.crc32(json.dumps(facts, sort_keys=True).encode()):08x}"


def no_checkpoint(workdir: pathlib.Path) -> InputError:
    """The error for a run without checkpoints."""
    return InputError(f"{workdir} has no checkpoint yet: train it first")


def none_intact(workdir: pathlib.Path, damaged: dict[int, str]) -> InputError:
    """The error for a run whose checkpoints are all damaged, with the reasons."""
    reasons = "; ".join(f"{step}: {reason}" for step, reason in damaged.items())
    return InputError(
        f"no checkpoint in {folder_of(workdir)} is intact and of this config ({reasons}): restore a copy, or choose "
        f"another --workdir"
    )


def _restore(name: RunName, run: RunFolder, abstract: Tree, damaged: dict[int, str]) -> tuple[int, Tree, Facts]:
    workdir, config = name.workdir, run.fingerprint
    while (step := _chosen(name, run, damaged)) is not None:
        read = _on_all_hosts(partial(_read, workdir, step, config, abstract))
        if not isinstance(read, str):
            tree, facts = read
            # Separate from reading, since all hosts must take part.
            read = _on_all_hosts(partial(_checked, facts, tree))
        if not isinstance(read, str):
            return step, tree, read
        if step not in steps(workdir):
            continue  # a run in progress has deleted it in the meantime
        damaged[step] = read
        _log.warning("checkpoint %d is damaged, or of another config (%s)", step, read)
    raise none_intact(workdir, damaged) if damaged else no_checkpoint(workdir)


def _chosen(name: RunName, run: RunFolder, damaged: dict[int, str]) -> int | None:
    """The step that a name refers to; None if there is none, or no undamaged one."""
    there = steps(name.workdir)
    if name.which == NEWEST:
        return max((step for step in there if step not in damaged), default=None)
    if not there:
        return None
    step = _best(run, there) if name.which == BEST else name.which
    if step not in there:
        raise InputError(f"{name.workdir} has no checkpoint of step {step}: it has {', '.join(map(str, there))}")
    return None if step in damaged else typing.cast(int, step)


def _best(run: RunFolder, there: list[int]) -> int:
    """The step with the lowest train.best_metric of the checkpoints that were evaluated when saved."""
    workdir, metric, scores = run.path, run.config.train.best_metric, {}
    for step in there:
        try:
            score = load_json(folder_of(workdir) / str(step) / "metrics" / "metrics")[metric]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if isinstance(score, float) and math.isfinite(score):
            scores[step] = score
    best = of_all_hosts(min(scores, key=scores.__getitem__, default=None))[0]
    if best is None:
        raise InputError(
            f"no checkpoint of {workdir} was evaluated when it was saved, so none is the best: use "
            f"{workdir}@{there[-1]}, or make train.checkpoint_every a multiple of train.eval_every"
        )
    return best


def _facts(workdir: pathlib.Path, step: int) -> Facts:
    facts = load_json(folder_of(workdir) / str(step) / "facts" / "metadata")
    check_facts(facts)
    return facts


def _read(workdir: pathlib.Path, step: int, config: str | None, abstract: Tree) -> tuple[Tree, Facts]:
    facts = _facts(workdir, step)
    if CHECKSUMS not in facts:
        raise ValueError("it has no checksums")
    if (facts.get("step"), facts.get("config")) != (step, config):
        raise ValueError("it was saved by another run, or at another step")
    restore_args = ocp.checkpoint_utils.construct_restore_args(abstract)
    arguments = ocp.args.PyTreeRestore(item=abstract, restore_args=restore_args, partial_restore=True)
    # Not through Orbax's manager, whose hosts wait for each other even if one has failed.
    return ocp.PyTreeCheckpointHandler().restore(
        epath.Path(folder_of(workdir) / str(step) / "state"), args=arguments
    ), facts


def _checked(facts: Facts, tree: Tree) -> Facts:
    """The facts without the checksums; raises ValueError if a checksum does not match."""
    expected = facts.pop(CHECKSUMS)
    found = checksums(tree) | {"facts": checksum_of(facts)}
    if wrong := [name for name, value in found.items() if expected.get(name) != value]:
        raise ValueError(f"wrong checksum of {', '.join(wrong)}")
    return {name: value for name, value in facts.items() if name not in ("step", "config")}


def _on_all_hosts(work: Callable[[], Done]) -> Done | str:
    """The result of `work`, or why it failed on some host: all hosts return the same outcome."""
    done = reason = None
    try:
        done = work()
    except MemoryError:
        raise
    except Exception as error:  # a damaged file can make a reader raise anything
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        reason = first_line(error)
    reasons = of_all_hosts(reason)
    if not any(reasons):
        return typing.cast(Done, done)
    number = next(i for i, found in enumerate(reasons) if found)
    return reasons[number] if len(reasons) == 1 else f"host {number}: {reasons[number]}"
