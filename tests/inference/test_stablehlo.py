"""Exported programs, run by a process without flash_lm, against the model itself."""

import json
import subprocess
import sys

import jax
import jax.export
import numpy as np
import pytest
from safetensors.numpy import load_file

import flash_lm
from flash_lm.errors import InputError
from flash_lm.export import main
from flash_lm.families.family import FAMILIES
from flash_lm.inference.export import export
from flash_lm.inference.stablehlo import Sizes
from inference.test_export import trained_model

pytestmark = pytest.mark.usefixtures("usual_promotion")

SLOW = ("transformer_plus_plus", "performer", "mega")  # a state that grows, constants, and one more kind of state
# Uses only calls that the card of such an export shows.
CALLER = """
import pathlib
import sys

import numpy as np
from jax import export
from safetensors.numpy import load_file

folder = pathlib.Path(sys.argv[1])
params = load_file(folder / "model.safetensors")
start, prefill, step = (
    export.deserialize((folder / f"{name}.stablehlo").read_bytes()).call for name in ("start", "prefill", "step")
)
rows, outputs = np.load(folder.parent / "rows.npy"), []
state = start(params)
for piece, lengths in ((rows[:, :8], [8, 8]), (rows[:, 8:16], [8, 3])):
    logits, state = prefill(params, state, piece, np.array(lengths, np.int32))
    outputs.append(logits)
for i in range(16, 21):
    logits, state = step(params, state, rows[:, i])
    outputs.append(logits)
np.save(folder.parent / "logits.npy", np.stack(outputs))
assert "flash_lm" not in sys.modules
"""


def expected_logits(trained, row, positions):
    """The logits after these positions of one row, from the parallel form."""
    model = trained.model.bind(trained.params)
    logits, _ = model.prefill(row[None], model.init_state(1, 32))
    return np.asarray(logits[0])[positions]


@pytest.mark.parametrize(
    "family",
    [
        "flash",
        *(pytest.param(x, marks=pytest.mark.slow("another family: the same code, in another process")) for x in SLOW),
    ],
)
def test_another_process_gets_the_same_logits(family, tmp_path):
    trained = trained_model(tmp_path / "mine", family)
    rows = np.random.default_rng(0).integers(3, 100, (2, 21)).astype(np.int32)
    np.save(tmp_path / "rows.npy", rows)
    assert export(trained, tmp_path / "out", "apache-2.0", "stablehlo", Sizes(rows=2, piece=8, capacity=32)) == []
    subprocess.run([sys.executable, "-c", CALLER, tmp_path / "out"], check=True, cwd=tmp_path, timeout=300)
    actual = np.load(tmp_path / "logits.npy")
    shorter = np.concatenate([rows[1, :11], rows[1, 16:]])  # its second piece had three real tokens
    close = {"atol": 1e-4 * np.abs(actual).max()}
    np.testing.assert_allclose(actual[:, 0], expected_logits(trained, rows[0], [7, *range(15, 21)]), **close)
    np.testing.assert_allclose(actual[:, 1], expected_logits(trained, shorter, [7, *range(10, 16)]), **close)


@pytest.mark.slow("exports and compiles a program of each family")
@pytest.mark.parametrize("family", [name for name, row in FAMILIES.items() if "causal" in row.serves])
def test_the_programs_of_every_family_that_decodes_match_its_model(family, tmp_path):
    """For all platforms; called here, with one prompt and one step."""
    trained = trained_model(tmp_path / "mine", family)
    assert export(trained, tmp_path / "out", "mit", "stablehlo", Sizes(rows=1, piece=8, capacity=16)) == []
    params = load_file(tmp_path / "out" / "model.safetensors")
    start, prefill, step = (
        jax.export.deserialize((tmp_path / "out" / f"{name}.stablehlo").read_bytes())
        for name in ("start", "prefill", "step")
    )
    assert step.platforms == ("cpu", "cuda", "rocm", "tpu")
    rows = np.random.default_rng(0).integers(3, 100, (1, 9)).astype(np.int32)
    first, state = prefill.call(params, start.call(params), rows[:, :8], np.array([8], np.int32))
    second, _ = step.call(params, state, rows[:, 8])
    actual = np.concatenate([first, second])
    np.testing.assert_allclose(actual, expected_logits(trained, rows[0], [7, 8]), atol=1e-4 * np.abs(actual).max())


def test_the_card_shows_how_to_call_the_programs(tmp_path):
    trained = trained_model(tmp_path / "mine", "transformer_plus_plus")
    export(trained, tmp_path / "out", "apache-2.0", "stablehlo", Sizes(capacity=40))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: config[key] for key in ("rows", "prompt_tokens_at_a_time", "most_tokens", "vocab_size")} == {
        "rows": 1,
        "prompt_tokens_at_a_time": 128,
        "most_tokens": 40,
        "vocab_size": trained.config.model.vocab_size,
    }
    assert config["flash_lm"]["step"] == 7 and config["platforms"] == ["cpu", "cuda", "rocm", "tpu"]
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"start.stablehlo", "prefill.stablehlo", "step.stablehlo", "model.safetensors", "README.md"}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "export.deserialize" in card and "library_name: jax" in card
    with pytest.raises(InputError, match="config.json"):
        flash_lm.load(tmp_path / "out")


def test_models_that_do_not_generate_have_no_programs(tmp_path):
    with pytest.raises(InputError, match="does not generate text: --format=stablehlo is of causal models"):
        export(trained_model(tmp_path / "masked", "flash", "masked_lm"), tmp_path / "out", "mit", "stablehlo")
    limited = trained_model(tmp_path / "limited", "linear_transformer")
    with pytest.raises(InputError, match="--capacity=4096 is more than the .* positions of"):
        export(limited, tmp_path / "out", "mit", "stablehlo", Sizes(capacity=4096))
    with pytest.raises(InputError, match="--rows, --capacity belong to --format=stablehlo"):
        main([f"--workdir={tmp_path / 'masked'}", f"--out={tmp_path}/x", "--license=mit", "--rows=2", "--capacity=9"])
    assert not (tmp_path / "out").exists()
