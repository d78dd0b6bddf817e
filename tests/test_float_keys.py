"""Numeric keys: a device computes in float32, and a value that float32 lacks is refused."""

import numpy as np

from flash_lm.config.experiment import Config, parse
from flash_lm.config.keys import keys as all_keys
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError


def list_problems(values: dict) -> list[str]:
    config = get_config()
    config.update_from_flattened_dict(values)
    try:
        parse(config)
    except InputError as error:
        return str(error).splitlines()
    return []


def test_numbers_that_float32_lacks():
    """In float32, 1 − 1e-9 is 1, and a subnormal number is 0."""
    assert list_problems({"train.eps": 1.2e-38, "train.b2": 0.9999999, "train.learning_rate": 1e-30}) == []
    assert list_problems({"train.eps": 1e-38, "train.b1": 0.999999999, "train.weight_decay": 1e-300}) == [
        "train.b1=0.999999999 is 1 in float32: it must be at least 0 and less than 1",
        "train.eps=1e-38 is 0 in float32: it must be more than 0",
        "train.weight_decay=1e-300 is 0 in float32: it must be 0, or 1.18e-38 or more",
    ]
    assert list_problems({"train.learning_rate": 1e300}) == [
        "train.learning_rate=1e+300 is infinite in float32: it must be at most 3.4e+38"
    ]


def test_each_accepted_value_is_accepted_in_float32():
    keys = [one.name for one in all_keys(Config) if one.kind is float]
    assert len(keys) > 20
    key_problems = lambda name, value: [line for line in list_problems({name: value}) if line.startswith(f"{name}=")]
    for name in keys:
        assert all(key_problems(name, value) for value in (1e-300, 1e-38, 1e300)), name
        for value in (0.1, 0.3, 0.999999999, 1.000000001):
            assert key_problems(name, value) or not key_problems(name, float(np.float32(value))), (name, value)
