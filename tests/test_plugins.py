"""Rows from a user's modules: on the command line, in a run, and their errors."""

import argparse
import itertools
import json
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from small import command, finish, override_flags, small_config, write_corpus, write_pairs

import flash_lm
from flash_lm import evaluate, export, generate, serve
from flash_lm.cli.flags import use_plugins
from flash_lm.cli.load import load_config
from flash_lm.config import keys, plugins
from flash_lm.config.experiment import add_sections, parse
from flash_lm.config.plugins import import_plugins
from flash_lm.config.registry import FAMILIES
from flash_lm.configs.base import get_config
from flash_lm.data.answers import CONTINUE, LABEL
from flash_lm.data.conditioning import SOURCE
from flash_lm.data.splits import load_splits
from flash_lm.data.tasks import Task
from flash_lm.errors import InputError
from flash_lm.families.family import complete
from flash_lm.families.flash import GAUOptions
from flash_lm.inference.engine import Engine
from flash_lm.inference.generation import Generator
from flash_lm.inference.model import load_model
from flash_lm.inference.settings import BeamSearch
from flash_lm.inference.translation import translate
from flash_lm.layers.attention_core import Pair
from flash_lm.layers.context import Context
from flash_lm.ops.segments import find_segments
from flash_lm.runs.jsonl import read_jsonl
from flash_lm.runs.run_folder import RunFolder
from flash_lm.training.resolve import continue_run, fill_from_parent
from flash_lm.training.train_loop import train

HERE = pathlib.Path(__file__).parent


@pytest.fixture
def restore_tables(restore_registries):
    """Removes what a test registers, and the modules that did."""
    yield
    for name in ("outside", "sigmoid_window"):
        sys.modules.pop(name, None)


@pytest.fixture
def sigmoid_window(restore_tables, monkeypatch):
    """The module that docs/extend.md shows."""
    monkeypatch.syspath_prepend(str(HERE))
    import_plugins(["sigmoid_window"])
    return sys.modules["sigmoid_window"]


def test_the_attention_of_the_page_matches_its_equation(sigmoid_window):
    """Against a loop in float64, over two documents and padding, causal and bidirectional."""
    draw, reach = np.random.default_rng(0), 3
    q, k, v = (draw.normal(size=(1, 2, 9, width)) for width in (4, 4, 5))
    ids = np.array([1, 1, 1, 1, 1, 2, 2, 2, 0])
    core = sigmoid_window.SigmoidWindowCore(reach)
    for causal in (True, False):
        context = Context(
            positions_BxL=jnp.zeros((1, 9), jnp.int32), segments=find_segments(jnp.asarray(ids[None])), causal=causal
        )
        actual = core({"attention": Pair(*(jnp.asarray(x, jnp.float32) for x in (q, k)))}, jnp.asarray(v), context)
        expected = np.zeros_like(v)
        for h, i, j in itertools.product(range(2), range(9), range(9)):
            if ids[i] == ids[j] > 0 and abs(i - j) < reach and (j <= i or not causal):
                weight = 1 / (1 + reach * np.exp(-q[0, h, i] @ k[0, h, j] / 2))
                expected[0, h, i] += weight * v[0, h, j]
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("usual_promotion")
def test_train_takes_the_attention_of_the_page(sigmoid_window, tmp_path):
    config = small_config(write_corpus(tmp_path / "text"), tmp_path / "cache")
    add_sections(config)
    config.plugins, config.model.family = ("sigmoid_window",), "sigmoid_window"
    config.model.sigmoid_window.reach = 5
    config.train.update(steps=8, eval_every=0, checkpoint_every=0)
    train(config, tmp_path / "run")
    losses = [line["loss"] for line in read_jsonl(tmp_path / "run" / "metrics.jsonl") if line["split"] == "train"]
    assert losses[-1] < losses[0]
    with pytest.raises(InputError, match="SigmoidWindowCore defines no prefill and no step: a model with it is"):
        load_model(tmp_path / "run").model.abstract.check_decodable()


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> pathlib.Path:
    """A run, trained by the command, with rows of all four tables that only a user's module defines."""
    folder = tmp_path_factory.mktemp("plugins")
    config = small_config("", folder / "cache")
    config.train.update(steps=4, eval_every=0, checkpoint_every=0)
    config.data.corpus, config.data.path = "stdlib", None
    words = ["--config=configs/base.py", f"--workdir={folder / 'run'}", "--config.plugins=outside"]
    mine = ["--config.model.family=powers", "--config.model.powers.power=3"]
    mine += ["--config.train.optimizer=signs", "--config.train.signs.share=0.25", "--config.model.gau.heads=2"]
    mine += ["--config.data.corpus=counting", "--config.data.counting.lines=30"]
    mine += ["--config.task=last_tokens", "--config.model.biased.pull=0.5", "--config.train.log_every=1"]
    mine += ["--config.data.last.tokens=3"]
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    train = ["flash_lm.train", *words, *override_flags(config), *mine]
    _, err = finish(command(*train, env=environment))
    message = next(line for line in err.splitlines() if line.startswith("family powers does not read "))
    assert "model.gau.heads" in message and "powers.power" not in message and "linear.chunk_size" not in message
    out, _ = finish(command(*train, env=environment))  # the same command resumes the run
    assert "all 4 steps are done" in out
    return folder / "run"


@pytest.mark.slow("trains a run")
def test_a_run_knows_its_plugins(run):
    values = json.loads((run / "config.json").read_text())
    assert values["plugins"] == ["outside"] and values["model"]["powers"] == {"power": 3}
    assert values["model"]["head"] is None and values["model"]["biased"] == {"pull": 0.5}  # the head of the task
    first, *_, last = (line for line in read_jsonl(run / "metrics.jsonl") if line["split"] == "train")
    assert last["bias"] < first["bias"] and last["bias"] > 1
    assert values["train"]["signs"] == {"share": 0.25} and values["data"]["counting"] == {"lines": 30}
    environment = os.environ | {"PYTHONPATH": str(HERE)}
    named = [f"--workdir={run}", "--plugins=outside"]
    finish(command("flash_lm.evaluate", *named, env=environment))
    (line,) = read_jsonl(run / "results.jsonl")
    assert (line["task"], line["corpus"], line["family"]) == ("last_tokens", "counting", "powers")
    assert "word_perplexity" not in line  # it would need all tokens
    rows = 30 * 2 * 11 // 32  # two documents, at least eleven bytes per line, one token each
    assert 3 * rows < line["tokens"] <= 3 * (rows + 4)
    generate = ["flash_lm.generate", *named, "--prompt=the", "--max_tokens=3"]
    finish(command(*generate, env=environment))
    _, err = finish(command(*generate), code=2)  # another directory, without the module
    assert err.count("\n") == 1 and "plugins=outside: there is no module outside: install it" in err


@pytest.mark.slow("trains a run, scores it and compiles two decode loops")
@pytest.mark.usefixtures("usual_promotion")
def test_a_conditioning_that_only_a_plugin_defines(restore_tables, monkeypatch, tmp_path, capsys):
    """Training rows, evaluate, generate and translate use it in the same way."""
    monkeypatch.syspath_prepend(str(HERE))
    import_plugins(["outside"])
    texts = [("abc", "c ba"), ("bd", "d b"), ("cad", "da c"), ("db", "b d")]
    config = small_config(str(write_pairs(tmp_path / "pairs", texts)), tmp_path / "cache", "linear_transformer")
    config.data.update(corpus="hf", text_column="de", pair_column="en", pack="examples")
    config.task, config.plugins = "backwards", ("outside",)
    config.train.update(steps=3, eval_every=0, checkpoint_every=0)
    run = tmp_path / "run"
    train(config, run)
    evaluate.main([f"--workdir={run}", "--split=test"])
    assert " tokens after a text read backwards" in capsys.readouterr().out
    (line,) = read_jsonl(run / "results.jsonl")
    trained = load_model(run)
    generator, end = Generator(trained), trained.tokenizer.end
    prompts = [trained.encode_prompt(first) for first, _ in texts]
    seconds = [np.append(trained.encode(second)[1:], end).astype(np.int32) for _, second in texts]
    scores = generator.engine.score(prompts, seconds)
    assert -sum(one.log_probs.sum() for one in scores) == pytest.approx(line["nll"], rel=1e-5)
    forward = Engine(trained.decode_params, trained.mesh, end=end, allowed_V=trained.text_ids())
    usual_scores = forward.score(prompts, seconds)
    assert all(abs(a.log_probs - b.log_probs).max() > 1e-6 for a, b in zip(scores, usual_scores, strict=True))
    best = [one.text for (one,) in generator.search([first for first, _ in texts], 5, BeamSearch(1))]
    answers = translate(trained, load_splits(trained.config.data), "test", BeamSearch(1), max_tokens=5)
    assert [one.answer for one in answers] == best
    generate.main([f"--workdir={run}", f"--prompt={texts[0][0]}", "--max_tokens=5", "--temperature=0"])
    assert capsys.readouterr().out == best[0] + "\n"
    with pytest.raises(InputError, match="logits is of complete texts"):
        flash_lm.load(run).logits([1, 2])


def test_a_task_takes_names_or_objects():
    named = Task(True, "continue", conditioning="source")
    assert (named.answers, named.conditioning) == (CONTINUE, SOURCE) and Task(False, None, labels=True).answers is LABEL
    with pytest.raises(
        InputError, match="conditioning='behind' of a task must be one of before, prefix, source, or an"
    ):
        Task(True, "continue", conditioning="behind")
    with pytest.raises(InputError, match="answers='sing' of a task must be one of None, continue, fill_in, or an"):
        Task(True, "sing")


@pytest.fixture
def evil(tmp_path, monkeypatch) -> pathlib.Path:
    """A run from somebody else; its config names a module next to it, which Python could import from the parent."""
    folder = tmp_path / "others" / "evil"
    folder.mkdir(parents=True)
    config = get_config()
    config.plugins = ("others.evil.payload", "this")
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "payload.py").write_text("import pathlib\npathlib.Path('ran').touch()\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return pathlib.Path("others/evil")


def _child(key: str, folder: pathlib.Path) -> ConfigDict:
    config = get_config()
    config.train[key] = str(folder)
    return config


DOORS = {
    "load": lambda folder: flash_lm.load(folder),
    "the wrong plugins": lambda folder: flash_lm.load(folder, plugins=["colorsys"]),
    "generate": lambda folder: generate.main([f"--workdir={folder}", "--prompt=a"]),
    "evaluate": lambda folder: evaluate.main([f"--workdir={folder}"]),
    "export": lambda folder: export.main([f"--workdir={folder}", "--out=out", "--license=mit"]),
    "serve": lambda folder: serve.main([f"--workdir={folder}", "--port=0"]),
    "config": lambda folder: load_config(str(folder), []),
    "a new run there": lambda folder: continue_run(get_config(), RunFolder(folder)),
    "branch": lambda folder: train(_child("branch_from", folder), pathlib.Path("branch")),
    "init": lambda folder: fill_from_parent(_child("init_from", folder), str(folder)),
}


@pytest.mark.parametrize("door", DOORS)
def test_loading_runs_only_code_that_was_named(evil, door):
    """Neither code of the folder nor of an installed module."""
    message = (
        "asks for plugins=others.evil.payload,this, and loading runs no code that you have not named: .* --plugins="
    )
    with pytest.raises(InputError, match=message):
        DOORS[door](evil)
    assert not pathlib.Path("ran").exists() and not {"others", "this"} & sys.modules.keys()


def test_named_modules_are_imported(restore_tables, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(HERE))
    config = get_config()
    config.plugins = ("outside",)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    monkeypatch.setattr(plugins, "_named", set())
    with pytest.raises(InputError, match="asks for plugins=outside"):
        _ = RunFolder(tmp_path).config
    assert "outside" not in sys.modules
    use_plugins(argparse.Namespace(plugins="outside"))
    assert RunFolder(tmp_path).config.plugins == ("outside",) and "powers" in FAMILIES


def test_only_module_names_are_suggested(tmp_path):
    config = get_config()
    config.plugins = ("a; rm -r b",)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(InputError, match="asks for plugins='a; rm -r b', which is no module: restore"):
        _ = RunFolder(tmp_path).config


def test_a_change_of_a_run_cannot_name_a_plugin(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(get_config().to_dict()))
    (tmp_path / "changes.jsonl").write_text('{"plugins": ["outside"]}\n')
    with pytest.raises(InputError, match="changes.jsonl is damaged"):
        _ = RunFolder(tmp_path).config


COMMANDS = {
    "command": ["-m", "flash_lm.train", "--workdir=run"],
    "recall": ["-m", "flash_lm", "recall"],
}


@pytest.mark.parametrize("kind", COMMANDS)
def test_commands_find_modules_in_the_working_directory(tmp_path, kind):
    """Both import the module, and end at an error in the config."""
    (tmp_path / "of_this_folder.py").write_text("print('imported', flush=True)\n")
    (tmp_path / "mine.py").write_text(
        "from studies.recall.configs import mqar_as_measured as its\n"
        "from studies.recall.configs.mqar_as_measured import *\n\n"
        "def get_config():\n    config = its.get_config()\n"
        "    config.plugins, config.train.clip = ('of_this_folder',), -1.0\n    return config\n"
    )
    environment = os.environ | {"PYTHONPATH": str(HERE.parent)}
    words = [sys.executable, *COMMANDS[kind], "--config=mine.py"]
    done = subprocess.run(
        words, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120, check=False
    )
    assert done.returncode == 2 and "imported" in done.stdout, done.stderr
    assert "there is no module" not in done.stderr and "train.clip=-1" in done.stderr.splitlines()[-1]


def test_a_config_from_before_the_import_gets_the_new_keys(restore_tables, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from flash_lm.configs import base\n\ndef get_config():\n    config = base.get_config()\n"
        "    config.plugins = ('outside',)\n    config.model.family = 'powers'\n    return config\n"
    )
    config = load_config(str(tmp_path / "mine.py"), ["--config.model.powers.power=5"])
    assert parse(config).model.get("powers.power") == 5
    older = get_config()
    del older.model["powers"]
    assert parse(older).model.get("powers.power") == 2


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("import flash_lm\nflash_lm.register_family('flash', None)", "model.family=flash is a name of flash_lm"),
        (
            "from flash_lm.config.keys import section\nsection('model.gau')(type('Mine', (), {}))",
            "already has a section model.gau: choose",
        ),
    ],
)
def test_a_module_that_fails_is_reported(tmp_path, monkeypatch, source, message):
    (tmp_path / "a_broken_one.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InputError, match=message):
        import_plugins(["a_broken_one"])


@pytest.mark.parametrize("name", ["no_such_module", "no_such.module", "not a name", ""])
def test_a_missing_module_is_one_line(name):
    config = get_config()
    config.plugins = (name,)
    with pytest.raises(InputError, match="there is no module .*: install it, or put its folder on PYTHONPATH"):
        parse(config)


def test_plugins_are_names(restore_tables):
    config = get_config()
    config.plugins = (1,)
    with pytest.raises(InputError, match="plugins=.* must be a tuple of names of modules"):
        parse(config)


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("model.rotary", {}, "section model.rotary: this is already a key"),
        ("model.sections", {}, "this is already a key"),
        ("modle.mine", {}, r"name a group \(data, model, train\) and a section of it"),
        ("mine", {}, "name a group"),
        ("model.a.b", {}, "name a group"),
        ("model.mine", {"__annotations__": {"reach": int}, "reach": 3}, r"declare reach with key\(default, unit"),
    ],
)
def test_an_invalid_section_is_refused(restore_tables, name, body, message):
    with pytest.raises(InputError, match=message):
        keys.section(name)(type("Mine", (), body))


def test_a_subclass_of_a_section_is_a_separate_section(restore_tables):
    @keys.section("model.mine")
    class Mine(GAUOptions):
        reach: int = keys.key(3, "tokens")

    config = get_config()
    config.model.update(mine={"heads": 4}, gau={"heads": 2}, vocab_size=10)
    model = complete(parse(config).model)
    assert (model[Mine].heads, model[GAUOptions].heads, model[Mine].reach) == (4, 2, 3)
    assert model[GAUOptions].expanded_dim == 256 and model[Mine].expanded_dim is None


@pytest.mark.parametrize("text", ["outside", "('outside',)", '("outside",)', "'outside'"])
def test_the_flag_names_modules_as_a_tuple_or_alone(restore_tables, monkeypatch, text):
    monkeypatch.syspath_prepend(str(HERE))
    config = load_config("quickstart", [f"--config.plugins={text}", "--config.model.family=powers"])
    assert config.plugins == ("outside",) and parse(config).model.family == "powers"


def test_keys_of_another_task_or_optimizer_are_reported(restore_tables, monkeypatch, caplog):
    monkeypatch.syspath_prepend(str(HERE))
    with caplog.at_level("INFO", "flash_lm"):
        load_config("quickstart", ["--config.plugins=outside", "--config.train.signs.share=0.1"])
        load_config("quickstart", ["--config.data.masking.rate=0.2", "--config.task=masked_lm"])
    (line,) = (record.getMessage() for record in caplog.records)
    assert "train.optimizer=adamw, model.head=softmax do not read train.signs.share" in line


@pytest.mark.parametrize(
    ("module", "advice"),
    [
        ("configs", "write from flash_lm.configs import"),
        ("studies", "run python -m flash_lm.… in the root of the repository"),
    ],
)
def test_a_config_that_imports_a_missing_package_gets_advice(tmp_path, monkeypatch, module, advice):
    monkeypatch.setitem(sys.modules, module, None)  # as outside of a checkout
    (tmp_path / "mine.py").write_text(f"from {module} import base\nget_config = base.get_config\n")
    with pytest.raises(InputError, match=f"imports {module}, .*: {advice}"):
        load_config(str(tmp_path / "mine.py"), [])
