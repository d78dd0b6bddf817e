"""The schema, its rules, and the overrides of the command line."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import pytest
from ml_collections import ConfigDict
from oracles import families
from oracles.sizes import parameters
from small import config_names, study_configs, text_tasks

from flash_lm.cli.load import config_name, load_config, load_module, packaged_configs, read_config, split_preset
from flash_lm.cli.types import mesh_shapes, parse_integers
from flash_lm.config.changes import apply_changes
from flash_lm.config.experiment import parse, parse_model
from flash_lm.config.overrides import apply_overrides
from flash_lm.configs import quickstart
from flash_lm.configs.base import get_config
from flash_lm.errors import InputError
from flash_lm.families.family import FAMILIES, complete, complete_config
from flash_lm.sweeps.grid import grid_runs
from flash_lm.training.train_state import ModelFunction

pytestmark = pytest.mark.every_family

ROOT = pathlib.Path(__file__).parent.parent
# In folders: ablations and studies start from a config, and tables are not configs.
CONFIGS = [
    *(name for name in config_names() if "/" not in name),
    *(name for name in study_configs() if name.startswith(("studies/recall", "studies/lra"))),
]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_is_valid(name):
    config = load_config(name, [])
    parse(config)
    module = load_module(split_preset(name)[0])
    for changes in module.get_runs(config).values() if hasattr(module, "get_runs") else ():
        complete_config(parse(apply_changes(config, changes)))


@pytest.mark.parametrize(
    ("word", "group", "key", "value"),
    [
        ("--config.model.num_layers=7", "model", "num_layers", 7),
        ("--config.model.mlp_dim=96", "model", "mlp_dim", 96),
        ("--config.model.rotary=false", "model", "rotary", False),
        ("--config.model.norm=rms", "model", "norm", "rms"),
        ("--config.train.learning_rate=1", "train", "learning_rate", 1.0),
        ("--config.mesh.shape=(2,-1,1)", "mesh", "shape", (2, -1, 1)),
        ("--config.mesh.shape=2,-1,1", "mesh", "shape", (2, -1, 1)),
        ("--config.mesh.shape=2 -1 1", "mesh", "shape", (2, -1, 1)),
        ("--config.data.cache_dir=a=b", "data", "cache_dir", "a=b"),
        ("--config.train.steps=30", "train", "warmup_steps", 3),
        ("--config.train.tokens=4097", "train", "steps", 3),
        ("--config.train.tokens=4096", "train", "warmup_steps", 0),
        ("--config.train.tokens=", "train", "steps", 300),
        ("--config.train.steps=9", "train", "warmup_steps", 0),
    ],
)
def test_an_override_takes_the_type_of_its_key(word, group, key, value):
    config = load_config("configs/base.py", [word])
    assert getattr(getattr(parse(config), group), key) == value


@pytest.mark.parametrize(
    "key", ["model.norm", "model.mlp_dim", "model.rotary", "data.tokenizer_path", "train.warmup_steps"]
)
def test_an_override_sets_an_open_key_back_to_open(key):
    """Also in the config of a run, which does not record the type of an open key."""
    values = {"model.norm": "rms", "model.mlp_dim": "8", "model.rotary": "true"}
    flag = f"--config.{key}={values.get(key, '7')}"
    group, name = key.split(".")
    for config in (get_config(), ConfigDict(get_config().to_dict())):
        apply_overrides(config, [flag])
        assert config[group][name] is not None
        apply_overrides(config, [f"--config.{key}="])
        assert config[group][name] is None
        apply_overrides(config, [flag])
        parse(config)
    with pytest.raises(InputError, match=r"model.num_layers= must be of type int"):
        apply_overrides(get_config(), ["--config.model.num_layers="])


def test_lists_of_a_command_take_commas_or_blanks():
    for text in ("8,1,1 1,2,4", "8 1 1 1 2 4", "8,1,1,1,2,4"):
        assert mesh_shapes(text, "--shapes") == [(8, 1, 1), (1, 2, 4)]
    for text in ("", "8,1", "a b c", "1.5,1,1"):
        with pytest.raises(InputError, match=f"--mesh={text} must be three integers"):
            mesh_shapes(text, "--mesh")
    assert parse_integers("512 1024") == parse_integers("512,1024") == [512, 1024]
    grids = [grid_runs(get_config(), [f"model.chunks.size=64{sign}128", "mesh.shape=(1,1,8)"])[0] for sign in ", "]
    assert grids[0] == grids[1] and len(grids[0]) == 2
    config = get_config()
    config.data.corpus, config.mesh.shape = "text", (1, 1, 8)
    assert list(grid_runs(config, ["data.path=/my dir/a.txt,b.txt"])[0]) == ["path=_my dir_a.txt", "path=b.txt"]
    with pytest.raises(InputError, match="model.norm=rms,: an empty value"):
        grid_runs(config, ["model.norm=rms,"])


@pytest.mark.parametrize(
    ("words", "pack"),
    [
        ("corpus=chat", "examples"),
        ("corpus=chat pack=stream", "stream"),  # and the config is refused
        ("pack=documents corpus=hf", "documents"),
        ("corpus=hf pair_column=b pack=examples", "examples"),
        ("corpus=listops", "examples"),
    ],
)
def test_another_corpus_brings_its_packing(words, pack):
    config = get_config()
    apply_overrides(config, [f"--config.data.{word}" for word in words.split()])
    assert config.data.pack == pack
    apply_overrides(config, ["--config.data.pair_column=", "--config.data.corpus=stdlib"])
    assert config.data.pack == (pack if pack == "documents" else "stream")


def test_all_bad_overrides_are_reported_at_once():
    words = [
        "--config.model.num_layer=3",
        "--config.train.steps=many",
        "--config.modle.family=flash",
        "--config.model=3",
        "--config.mine.x=3",
        "--verbose",
        "--config.path=books",
        "--data.path=books",
    ]
    with pytest.raises(InputError) as error:
        load_config("configs/base.py", words)
    lines = str(error.value).splitlines()
    assert len(lines) == len(words)
    assert "did you mean model.num_layers?" in lines[0]
    assert lines[1] == "train.steps=many must be of type int"
    assert "did you mean model?" in lines[2]
    assert "group of keys" in lines[3]
    assert "unknown key mine" in lines[4]
    assert "unknown argument --verbose" in lines[5]
    assert "did you mean data.path?" in lines[6]
    assert "did you mean --config.data.path=books?" in lines[7]


def test_all_impossible_values_are_reported_at_once():
    config = get_config()
    config.model.num_layers = 0
    config.model.norm = "batch"
    config.data.length = 500
    config.train.b1 = 1.0
    config.train.learning_rate = float("nan")
    config.mesh.shape = (-1, -1, 1)
    config.seed = -1
    with pytest.raises(InputError) as error:
        parse(config)
    text = str(error.value)
    for key in ("model.num_layers=0", "model.norm=batch", "train.b1=1.0", "train.learning_rate=nan", "mesh.shape"):
        assert key in text
    assert "seed=-1" in text
    assert "data.tokens_per_batch=2048 must be a multiple of data.length=500" in text


@pytest.mark.parametrize(
    ("group", "values", "expected"),
    [
        ("model", {"causal": False}, "needs a causal model"),
        ("data", {"corpus": "hf"}, "needs either data.name"),
        ("data", {"corpus": "hf", "name": "a/b", "path": "c"}, "data.name=a/b and data.path=c"),
        ("data", {"masking.rate": 1.0}, "more than 0 and less than 1"),
        ("train", {"schedule": "step"}, "go together"),
        ("train", {"boundaries": (3,)}, "go together"),
        ("train", {"schedule": "step", "boundaries": (200, 100)}, "positive, increasing steps"),
        ("train", {"schedule": "step", "boundaries": (20, 40)}, "between train.warmup_steps=30 and train.steps=300"),
        ("train", {"schedule": "step", "boundaries": (40, 300)}, "between train.warmup_steps=30 and train.steps=300"),
        ("train", {"schedule": "step", "boundaries": (200, 200)}, "positive, increasing steps"),
        ("mesh", {"rules": (("kernel", ("fsdp", "model")),)}, "mesh axes"),
        ("mesh", {"rules": (("kernel", ("fsdp", "fsdp")),)}, "different mesh axes"),
        ("mesh", {"rules": (("kernel", (("tensor", "fsdp"), "fsdp")),)}, "different mesh axes"),
        ("mesh", {"rules": (("kernel", (("tensor", None),)),)}, "tuples of them"),
        ("mesh", {"rules": (("(", ("fsdp",)),)}, "pairs of a regex"),
        ("mesh", {"rules": ("kernel",)}, "pairs of a regex"),
        ("model", {"chunks.local_attention": False, "chunks.global_attention": False}, "switch one on"),
        ("model", {"normalizer": "0"}, "count, length, length_everywhere or a positive integer"),
        ("model", {"max_length": 256}, None),
        ("data", {"length": 1024}, "greater than model.max_length=512"),
        ("data", {"corpus": "text"}, "needs data.path"),
        ("train", {"accumulate": 3}, "cannot be split into"),
        (
            "train",
            {"steps": 9, "tokens": 4096},
            "are 2 steps, and train.steps=9: leave one open, with --config.train.steps= ",
        ),
        ("train", {"tokens": 0}, "train.tokens=0 must be 1 or more"),
        ("train", {"warmup_steps": 300}, "less than train.steps=300: lower it, or leave it open with .*=$"),
        ("train", {"decay_steps": 271}, "at most the 270 steps after the warm-up"),
        ("train", {"decay_steps": 9, "schedule": "constant"}, "of linear, cosine, sqrt, not constant"),
    ],
)
def test_keys_that_exclude_each_other(group, values, expected):
    config = get_config()
    config[group].update_from_flattened_dict(values)
    if expected is None:
        assert parse(config).data.length == 256
        return
    with pytest.raises(InputError, match=expected):
        parse(config)


def test_masked_rows_and_examples_have_few_targets():
    for changes, few in (
        ({}, False),
        ({"data.pack": "documents"}, False),
        ({"task": "masked_lm"}, True),
        ({"data.corpus": "mqar", "data.pack": "examples"}, True),
    ):
        config = get_config()
        config.update_from_flattened_dict(changes)
        assert parse(config).few_targets is few


def test_a_masked_model_is_bidirectional_and_divides_by_the_sequence_length():
    config = get_config()
    config.task, config.data.length = "masked_lm", 256
    parsed = parse(config)
    assert parsed.model.causal is False
    assert complete(dataclasses.replace(parsed.model, vocab_size=10)).normalizer == "256"


def test_a_missing_key_and_an_unknown_one():
    config = get_config()
    with config.unlocked():
        del config.train.clip
        config.train.clipping = 1.0
    with pytest.raises(InputError) as error:
        parse(config)
    assert "unknown key train.clipping: did you mean train.clip?" in str(error.value)
    assert "train.clip is missing" in str(error.value)


def test_a_bool_is_not_an_integer():
    config = get_config().model
    config.causal = True
    values = config.to_dict() | {"num_layers": True}
    with pytest.raises(InputError, match="num_layers=True must be of type int"):
        parse_model(type(config)(values))


@pytest.mark.parametrize("keys", [{"family": "flash"}, {"family": "mega", "mega.attention_function": "laplace"}])
def test_a_count_cannot_divide_scores(keys):
    config = get_config().model
    config.update_from_flattened_dict({**keys, "normalizer": "count", "vocab_size": 10})
    with pytest.raises(InputError, match="normalizer=count cannot divide scores: set model.divides=weights"):
        complete(parse_model(config))


def test_bidirectional_models_take_the_longest_row_for_normalizer():
    config = get_config().model
    config.update(causal=False, vocab_size=10)
    assert complete(parse_model(config)).normalizer == "512"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"family": "transformer", "num_heads": 3}, "must be a multiple of model.num_heads=3"),
        ({"family": "transformer_plus", "model_dim": 12}, "the head width 12 / 4 must be even"),
        ({"family": "flash", "gau.shared_dim": 7}, "model.gau.shared_dim=7 must be even"),
        ({"family": "flash_quad", "gau.shared_dim": 7, "rotary": False, "gau.relative_bias": "rope"}, "must be even"),
        ({"family": "flash", "model_dim": 15}, "model.model_dim=15 must be even"),
        ({"family": "flash", "num_heads": 3}, None),  # a GAU has no heads
    ],
)
def test_widths_that_a_family_cannot_split(values, expected):
    config = get_config().model
    config.update_from_flattened_dict({"vocab_size": 10, **values})
    if expected is None:
        complete(parse_model(config))
        return
    with pytest.raises(InputError, match=expected):
        complete(parse_model(config))


@pytest.mark.parametrize("key", ["z_loss", "label_smoothing"])
def test_a_term_of_the_softmax_needs_a_softmax(key):
    config = apply_changes(get_config(), {"model.vocab_size": 256, f"train.{key}": 1e-4})
    parse(config)
    with pytest.raises(InputError, match=f"train.{key} is of model.head=softmax, not logistics: set it to 0"):
        parse(apply_changes(config, {"model.head": "logistics"}))


def test_the_papers_configs_are_of_one_size():
    names = packaged_configs()["base_110m"]
    configs = {name: load_config(f"base_110m:{name}", []) for name in names}
    # A plugin's family is a key of another one.
    for family in FAMILIES.keys() - set(names):
        keys = {"model.family": family, "task": text_tasks(family)[0]}
        configs[family] = load_config("flash_base", [f"--config.{key}={value}" for key, value in keys.items()])
    assert [name for name in names if name not in FAMILIES and not name.endswith("_hybrid")] == ["deltanet"]
    counts = {}
    for name, full in configs.items():
        config = full.model
        config.vocab_size = 32000
        model = ModelFunction(complete(parse_model(config)), seed=0)
        settings = families.complete(config.to_dict() | {"causal": True})
        learned = config.max_length * config.model_dim if settings.absolute_positions == "learned" else 0
        learned += config.num_layers * families.FAMILIES[config.family].tables(settings)
        assert model.parameter_count() == parameters(settings), name
        counts[name] = model.parameter_count() - learned
    assert max(counts.values()) / min(counts.values()) < 1.03
    assert all(abs(count / 110e6 - 1) < 0.03 for count in counts.values())


@pytest.mark.parametrize(
    ("file", "presets", "dim", "mlp"), [("base_340m", 7, 1024, 2816), ("base_1300m", 5, 2048, 5632)]
)
def test_recent_families_are_of_one_size_at_the_published_shapes(file, presets, dim, mlp):
    """340M without the embeddings and the head of the larger vocabularies: here 300M and 65M."""
    counts = {}
    for name in packaged_configs()[file]:
        model = load_config(f"{file}:{name}", []).model
        model.vocab_size = 32000
        counts[name] = ModelFunction(complete(parse_model(model)), seed=0).parameter_count()
    assert len(counts) == presets
    like = counts["transformer_plus_plus"]
    assert like == 24 * (4 * dim**2 + 3 * dim * mlp + 2 * dim) + dim + 2 * 32000 * dim
    assert all(abs(count / like - 1) < 0.03 for count in counts.values()), counts


def test_a_config_file_must_exist_and_define_get_config(tmp_path):
    with pytest.raises(InputError, match="no config .*none.py: give a file"):
        load_config(str(tmp_path / "none.py"), [])
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(InputError, match="defines no get_config"):
        load_config(str(tmp_path / "empty.py"), [])


PRESETS = 'PRESETS = {"mamba2": 7, "gla": 8}\n'
TAKES_A_NAME = """
from flash_lm.configs import base

def get_config(name):
    config = base.get_config()
    config.seed = PRESETS[name]
    return config
"""
TAKES_NONE = "from flash_lm.configs.base import get_config\n"
MAY_TAKE_ONE = TAKES_A_NAME.replace("(name)", "(name='gla')")


@pytest.mark.parametrize(
    ("text", "name", "seed"),
    [
        (PRESETS + TAKES_A_NAME, ":mamba2", 7),
        (PRESETS + MAY_TAKE_ONE, ":mamba2", 7),
        (PRESETS + MAY_TAKE_ONE, "", 8),
        (TAKES_NONE, "", 0),
    ],
)
@pytest.mark.parametrize("file", ["presets.py", "x:y.py", "2:1/presets.py"])
def test_a_name_behind_a_colon_chooses_a_preset(text, name, seed, file, tmp_path):
    """A file with a colon in its name is a file."""
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(text)
    assert load_config(f"{tmp_path / file}{name}", []).seed == seed


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (PRESETS + TAKES_A_NAME, ":mamba", "{file} has no preset mamba: did you mean {file}:mamba2?"),
        (PRESETS + TAKES_A_NAME, ":xyz", "{file} has no preset xyz: give one of mamba2, gla"),
        (
            PRESETS + TAKES_A_NAME,
            "",
            "{file} needs the name of a preset: give --config={file}:NAME, where NAME is one of mamba2, gla",
        ),
        (
            PRESETS + TAKES_A_NAME,
            ":",
            "{file} needs the name of a preset: give --config={file}:NAME, where NAME is one of mamba2, gla",
        ),
        (
            TAKES_A_NAME,
            "",
            "{file} needs the name of a preset: give --config={file}:NAME, and declare what NAME may be as PRESETS",
        ),
        (TAKES_NONE, ":", "{file} has no presets, that is PRESETS and get_config(name): leave : out"),
        (TAKES_NONE, ":gla", "{file} has no presets, that is PRESETS and get_config(name): leave :gla out"),
        (PRESETS + TAKES_NONE, ":gla", "{file} has no presets, that is PRESETS and get_config(name): leave :gla out"),
        (TAKES_A_NAME, ":gla", "{file} has no presets, that is PRESETS and get_config(name): leave :gla out"),
    ],
)
def test_an_unknown_preset_is_reported_in_one_line(text, name, message, tmp_path):
    file = tmp_path / "presets.py"
    file.write_text(text)
    with pytest.raises(InputError) as error:
        load_config(f"{file}{name}", [])
    assert str(error.value) == message.format(file=file)


def test_a_preset_of_the_package():
    """Also by the former name of its file."""
    assert load_config("base_110m:mamba2", []).model.family == "mamba2"
    assert load_config(str(ROOT / "configs" / "base_340m.py:gla"), []).model.num_heads == 4
    assert config_name("configs/base_110m.py:mamba2") == "base_110m_mamba2" and config_name("a/b.py") == "b"
    for path in ("configs/mamba2_base.py", "mamba2"):
        with pytest.raises(InputError, match=f"no config {path}: did you mean base_110m:mamba2"):
            load_config(path, [])


@pytest.mark.parametrize("name", [*packaged_configs()])
def test_a_docstring_names_existing_configs(name):
    for path in re.findall(r"--config=([\w/:]+(?:\.py(?::\w+)?)?)", load_module(name).__doc__ or ""):
        read_config(str(ROOT / path) if path.startswith(("configs/", "studies/")) else path)


def test_the_page_of_keys_is_current(tmp_path):
    """The script writes it into another file: each key of the schema, and the page in docs/."""
    words = [sys.executable, "docs/tools/write_keys.py", f"--out={tmp_path / 'keys.md'}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = (tmp_path / "keys.md").read_text()
    assert written == (ROOT / "docs" / "keys.md").read_text(), "run python docs/tools/write_keys.py"
    for key in get_config().model.gau:
        assert f"| `{key}` |" in written


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layers/.*", ("layers/.*",)),
        ("^embedding$,sublayer_0/(query|key)", ("^embedding$", "sublayer_0/(query|key)")),
        ("('a,b',)", ("a,b",)),
        ("", ()),
    ],
)
def test_regexes_on_the_command_line(text, expected):
    assert load_config("quickstart", [f"--config.train.freeze={text}"]).train.freeze == expected


@pytest.mark.parametrize(
    ("shape", "length", "accumulate", "rows"),
    [
        ((-1, 1, 1), 512, 1, 8),
        ((2, 4, 1), 512, 1, 8),
        ((1, 1, 8), 512, 1, 4),
        ((-1, 1, 4), 512, 3, 6),
        ((-1, 1, 1), 128, 1, 16),
        ((-1, 1, 1), 96, 1, 24),
        ((1, 1, -1), 4096, 1, 1),
    ],
)
def test_an_open_batch_is_the_smallest_that_the_devices_share(shape, length, accumulate, rows):
    """At least 2048 tokens, on eight devices."""
    config = quickstart.get_config()
    config.mesh.shape, config.train.accumulate, config.data.length, config.model.max_length = (
        shape,
        accumulate,
        length,
        length,
    )
    data = parse(config).data
    assert (data.batch_size, data.tokens_per_batch) == (rows, rows * length)


def test_a_data_set_larger_than_a_run_is_streamed():
    """Otherwise all of it would be downloaded and tokenized first."""
    large = ("cerebras/SlimPajama-627B", "allenai/c4")
    names = [name for name in CONFIGS if name.startswith(("base_340m:", "base_1300m:")) or name.endswith("_c4")]
    assert len(names) > 5
    for name in names:
        data = read_config(name).data
        assert data.name in large and data.streaming, name
