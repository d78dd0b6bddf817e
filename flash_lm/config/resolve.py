"""Closes the open keys of a config."""

import math
from collections.abc import Mapping
from typing import Any

from flash_lm.config.registry import TASKS

SHUFFLE_BUFFER = 64  # millions of characters


STEPS = 300


BATCH_TOKENS = 2048


def filled(values: dict[str, Any]) -> dict[str, Any]:
    """Fills in the open keys that follow from other keys; the config is a nested dict of plain values."""
    values = {name: dict(value) if isinstance(value, dict) else value for name, value in values.items()}
    model, data, train = (values.get(name, {}) for name in ("model", "data", "train"))
    if task := TASKS.get(values.get("task", "")):
        of_task = {"causal": task.causal, "head": task.head}
        model.update({name: value for name, value in of_task.items() if model.get(name) is None})
    if data.get("length") is None:
        data["length"] = model.get("max_length")
    if data.get("shuffle_buffer") is None:
        data["shuffle_buffer"] = SHUFFLE_BUFFER
    if model.get("normalizer") is None and (model.get("causal") is False or model.get("divides") == "scores"):
        model["normalizer"] = str(data["length"])
    if data.get("tokens_per_batch") is None:
        data["tokens_per_batch"] = _batch_tokens(data["length"], values.get("mesh", {}), train.get("accumulate"))
    if train.get("steps") is None:
        train["steps"] = steps_of(train.get("tokens"), data.get("tokens_per_batch"))
    if train.get("warmup_steps") is None and isinstance(train.get("steps"), int):
        train["warmup_steps"] = train["steps"] // 10
    return values


def _batch_tokens(length: Any, mesh: Mapping[str, Any], accumulate: Any) -> Any:
    """The least number of tokens from `BATCH_TOKENS` on whose rows the devices share evenly; as it is if that fails."""
    import jax  # noqa: PLC0415 (only where the key is open)

    shape: Any = mesh.get("shape")
    if not (type(length) is type(accumulate) is int and length > 0 and accumulate > 0 and _is_shape(shape)):
        return BATCH_TOKENS  # and what is wrong is said elsewhere
    data, fsdp, _ = shape
    known = math.prod(size for size in shape if size > 0)
    of_rows = math.prod(size for size in (data, fsdp) if size > 0)
    parts = of_rows * (max(jax.device_count() // known, 1) if -1 in (data, fsdp) else 1) * accumulate
    rows = -(-BATCH_TOKENS // length)
    return -(-rows // parts) * parts * length


def _is_shape(shape: Any) -> bool:
    return isinstance(shape, tuple | list) and len(shape) == 3 and all(type(n) is int and n for n in shape)


def steps_of(tokens: Any, a_step: Any) -> int:
    """Steps that train on so many tokens, rounded up; `STEPS` if one of the two numbers is open."""
    counts = type(tokens) is int and type(a_step) is int and a_step > 0
    return -(-tokens // a_step) if counts else STEPS
