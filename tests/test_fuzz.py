"""Any config and any flags end in a run or in a list of errors: exit code 2, never a traceback."""

import dataclasses
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import config_names

from flash_lm import evaluate, generate, train
from flash_lm.cli.load import load_config
from flash_lm.cli.run import run
from flash_lm.config.experiment import parse
from flash_lm.configs import base
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, complete_config
from flash_lm.training import train_loop
from flash_lm.training.sharding import make_mesh

CONFIGS = [name for name in config_names() if "/" not in name]
KEYS = sorted(
    f"{group}.{key}" if isinstance(value, dict) else group
    for group, value in base.get_config().to_dict().items()
    for key in (value if isinstance(value, dict) else [group])
)
NONSENSE = st.one_of(
    st.integers(-3, 70).map(str),
    st.sampled_from(["0", "-1", "1e30", "nan", "inf", "-inf", "0.5", "", " ", "None", "true", "False", "10" * 20]),
    st.sampled_from(["(1,2)", "(-1,1,1)", "(8,1,1)", "(3,1,1)", "(0,0,0)", "()", "((", "('a',)", "1,2,4", "[1]", "{}"]),
    st.sampled_from(
        ["float16", "bfloat16", "bytes", "hf", "text", "count", "paper", "7", "skip", "softmax", "../../etc"]
    ),
    st.sampled_from(sorted(FAMILIES)),
    st.text(max_size=8),
)
OVERRIDES = st.lists(
    st.one_of(
        st.builds("--config.{}={}".format, st.sampled_from(KEYS), NONSENSE),
        st.builds("--config.{}={}".format, st.sampled_from(["model", "data.x", "model.famly", "", "a.b.c"]), NONSENSE),
        st.builds("--{}".format, st.text(max_size=12)),
    ),
    max_size=5,
)


def check(words: list[str], config: str) -> bool:
    """Whether the flags are valid; otherwise the errors must be complete lines."""
    try:
        parsed = complete_config(parse(load_config(config, words)))
        make_mesh(parsed.mesh)
    except InputError as error:
        lines = str(error).splitlines()
        assert lines and all(line.strip() for line in lines)
        return False
    assert dataclasses.is_dataclass(parsed)
    return True


def fuzz(examples: int):
    return settings(
        max_examples=examples, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck)
    )


@fuzz(300)
@given(OVERRIDES, st.sampled_from(CONFIGS))
def test_a_config_is_good_or_its_errors_are_reported(words, config):
    check(words, config)


@pytest.mark.slow("checks thousands of configs")
def test_thousands_of_them():
    seen = []

    @fuzz(5000)
    @given(OVERRIDES, st.sampled_from(CONFIGS))
    def each(words, config):
        seen.append(check(words, config))

    each()
    # Most are invalid, and some are valid.
    assert len(seen) >= 5000 and 50 < sum(seen) < 4500, (len(seen), sum(seen))


@pytest.mark.parametrize("main", [train.main, evaluate.main, generate.main], ids=["train", "evaluate", "generate"])
def test_a_command_ends_with_code_2_or_is_good(main, tmp_path, monkeypatch, capsys):
    """Training runs only up to the corpus; the other commands have no run to read."""

    class Good(BaseException):
        """Passes through `run`, which ends a process after any other error."""

    def build(config, run):
        complete_config(config)
        raise Good

    monkeypatch.setattr(train_loop, "build_experiment", build)
    flags = st.lists(
        st.builds(
            "--{}={}".format,
            st.sampled_from(["workdir", "profile", "split", "lengths", "out", "prompt", "max_tokens", "top_k", "mesh"]),
            st.one_of(st.sampled_from([str(tmp_path), str(tmp_path / "none"), "1:2", "5:1", "x"]), NONSENSE),
        ),
        max_size=3,
    )

    @fuzz(60)
    @given(OVERRIDES, flags)
    def each(words, flags):
        config = ["--config=configs/tiny.py"] if main is train.main else []
        monkeypatch.setattr(sys, "argv", ["command", *config, f"--workdir={tmp_path / 'run'}", *words, *flags])
        try:
            run(main)
        except Good:
            assert main is train.main
        except SystemExit as stop:
            out, err = capsys.readouterr()
            assert stop.code == 2 or (stop.code == 0 and "usage:" in out), err
            assert "Traceback" not in err and (stop.code == 0 or "error: " in err)

    each()
