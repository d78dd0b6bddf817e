"""Models on the hub, with a fake hub that is a folder; and weights in several files."""

import json
import shutil

import httpx2
import huggingface_hub
import numpy as np
import pytest
from huggingface_hub import errors
from inference.test_export import trained_model
from safetensors.numpy import load_file
from small import small_config, write_corpus

import flash_lm
from flash_lm import evaluate, export
from flash_lm.errors import InputError
from flash_lm.inference import model as trained_model_module
from flash_lm.inference import scoring
from flash_lm.inference.export import export as write
from flash_lm.inference.model import load_model
from flash_lm.training import export_folder
from flash_lm.training.fingerprint import fingerprint
from flash_lm.training.hub import download, make_repository, push
from flash_lm.training.train_loop import train

COMMIT = "0123456789abcdef" * 2 + "01234567"
pytestmark = pytest.mark.usefixtures("usual_promotion")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A fake hub with its repositories in `folder`; each call raises `fails` if that is set."""
    folder = tmp_path / "hub"
    folder.mkdir()

    class Hub:
        fails, private = None, {}

        def check(self, name):
            huggingface_hub.utils.validate_repo_id(name)
            if self.fails:
                raise self.fails

        def create_repo(self, name, private, exist_ok):
            self.check(name)
            assert exist_ok
            (folder / name).mkdir(parents=True, exist_ok=True)
            self.private.setdefault(name, private)

        def list_repo_files(self, name):
            self.check(name)
            return [str(x.relative_to(folder / name)) for x in (folder / name).rglob("*") if x.is_file()]

        def upload_folder(self, repo_id, folder_path, commit_message, delete_patterns):
            self.check(repo_id)
            for path in [x for pattern in delete_patterns for x in (folder / repo_id).glob(pattern)]:
                path.unlink()
            shutil.copytree(folder_path, folder / repo_id, dirs_exist_ok=True)
            return f"https://huggingface.co/{repo_id}/tree/main"

        def snapshot_download(self, name, allow_patterns):
            self.check(name)
            if not (folder / name).exists():
                raise errors.RepositoryNotFoundError("404", response=response(404))
            copy = folder / f"models--{name.replace('/', '--')}" / "snapshots" / COMMIT
            shutil.copytree(folder / name, copy, dirs_exist_ok=True)
            return str(copy)

    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    fake.folder = folder
    return fake


def response(status):
    return httpx2.Response(status, request=httpx2.Request("GET", "https://huggingface.co/api"))


@pytest.fixture
def model(tmp_path):
    return trained_model(tmp_path / "run", "linear_transformer")


def test_a_pushed_model_can_be_loaded(hub, model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(trained_model_module, "load_model", lambda *words, **options: model)  # it has no checkpoint
    words = [f"--workdir={model.run}", f"--out={tmp_path}/out", "--license=mit", "--push=me/mine", "--private"]
    export.main(words)
    assert "uploaded: https://huggingface.co/me/mine/tree/main" in capsys.readouterr().out
    assert hub.private == {"me/mine": True}
    assert 'flash_lm.load("hub:me/mine")' in (hub.folder / "me" / "mine" / "README.md").read_text()
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    downloaded, exported = flash_lm.load("hub:me/mine"), flash_lm.load(tmp_path / "out")
    assert downloaded.generate("a cat", 5, temperature=0.0) == exported.generate("a cat", 5, temperature=0.0)
    assert downloaded.config == exported.config
    with pytest.raises(InputError, match="hub:me/mine is on the hub and has no folder for results: give --results="):
        evaluate.main(["--workdir=hub:me/mine", "--split=test", "--no_compile_cache"])
    with pytest.raises(InputError, match="has one state: leave @best out"):
        flash_lm.load("hub:me/mine@best")


def test_an_upload_replaces_the_model(hub, model, tmp_path, monkeypatch):
    """Weight files in parts and their index would hide a later single file."""
    monkeypatch.setattr(export_folder, "_LARGEST_FILE", 8000)
    write(model, tmp_path / "parts", "mit")
    monkeypatch.undo()
    write(model, tmp_path / "one", "mit")
    remote = tmp_path / "hub" / "me" / "mine"
    (remote / "onnx").mkdir(parents=True)
    (remote / "onnx" / "config.json").write_text("of somebody else")
    (remote / "step.stablehlo").touch()  # a program of other weights
    for name in ("parts", "one"):
        push_to(hub, monkeypatch, tmp_path / name)
    assert not [*remote.glob("model-*")]
    names = lambda folder: {str(path.relative_to(folder)) for path in folder.rglob("*")}
    assert names(remote) == names(tmp_path / "one") | {"onnx", "onnx/config.json"}


def push_to(hub, monkeypatch, folder):
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    push(folder, "me/mine")


def test_a_failed_upload_reports_what_was_written(hub, model, tmp_path, monkeypatch):
    monkeypatch.setattr(trained_model_module, "load_model", lambda *words, **options: model)
    monkeypatch.setattr(hub, "upload_folder", lambda **words: (_ for _ in ()).throw(TimeoutError("slow")))
    words = [f"--workdir={model.run}", f"--out={tmp_path}/out", "--license=mit", "--push=me/mine"]
    with pytest.raises(InputError, match=r"cannot be reached \(slow\).*out is written: upload it with hf upload me/"):
        export.main(words)
    hub.fails = errors.LocalTokenNotFoundError("no token")
    with pytest.raises(InputError, match="nobody is logged in"):
        export.main([word.replace("/out", "/other") for word in words])
    assert (tmp_path / "out").exists() and not (tmp_path / "other").exists()


def test_a_refused_export_makes_no_repository(hub, model, tmp_path, monkeypatch):
    monkeypatch.setattr(trained_model_module, "load_model", lambda *words, **options: model)
    (tmp_path / "out").mkdir()
    with pytest.raises(InputError, match="already exists"):
        export.main([f"--workdir={model.run}", f"--out={tmp_path}/out", "--license=mit", "--push=me/mine"])
    assert not list(hub.folder.iterdir())


def test_a_repository_without_an_export_is_refused(hub):
    (hub.folder / "them" / "llama").mkdir(parents=True)
    (hub.folder / "them" / "llama" / "model.safetensors").touch()
    with pytest.raises(InputError, match=r"hub:them/llama is no export of flash_lm: .*flash-lm import"):
        flash_lm.load("hub:them/llama")


@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        (
            errors.LocalTokenNotFoundError("no token"),
            "nobody is logged in to the hub: run hf auth login, or set HF_TOKEN",
        ),
        (errors.HfHubHTTPError("bad", response=response(401)), r"refuses me/mine \(401\): the token is not valid"),
        (errors.HfHubHTTPError("bad", response=response(403)), r"refuses me/mine \(403\): the token may not do this"),
        (errors.HfHubHTTPError("busy", response=response(503)), r"refuses me/mine \(503\): .*busy"),
        (errors.GatedRepoError("gated", response=response(403)), "there is no model me/mine on the hub, or no access"),
        (errors.LocalEntryNotFoundError("offline"), "the hub cannot be reached, and there is no copy of me/mine"),
        (httpx2.ConnectError("refused"), r"the hub cannot be reached \(refused\): connect, and try again"),
        (TimeoutError("slow"), r"the hub cannot be reached \(slow\)"),
        (OSError(28, "No space left on device"), "the files of me/mine cannot be read or written: .*No space left"),
    ],
    ids=lambda x: x if isinstance(x, str) else type(x).__name__,
)
def test_errors_are_one_line(hub, tmp_path, fails, expected):
    hub.fails = fails
    for call in (lambda: make_repository("me/mine", private=False), lambda: flash_lm.load("hub:me/mine")):
        with pytest.raises(InputError, match=expected) as error:
            call()
        assert "\n" not in str(error.value)


def test_bad_names_and_flags(hub, tmp_path):
    with pytest.raises(InputError, match="a/b,c is no name of a model on the hub .*: give OWNER/NAME"):
        make_repository("a/b,c", private=False)
    with pytest.raises(InputError, match="mine is no name of a model on the hub: give OWNER/NAME"):
        make_repository("mine", private=False)
    with pytest.raises(InputError, match="there is no model me/other on the hub"):
        flash_lm.load("hub:me/other")
    with pytest.raises(InputError, match="--private belongs to --push"):
        export.main(["--workdir=x", "--out=y", "--license=mit", "--private"])


def test_large_weights_are_in_several_files(model, tmp_path, monkeypatch):
    write(model, tmp_path / "one", "mit")
    monkeypatch.setattr(export_folder, "_LARGEST_FILE", 8000)
    write(model, tmp_path / "several", "mit")
    files = sorted(path.name for path in (tmp_path / "several").glob("*.safetensors"))
    assert len(files) > 1 and files[0] == f"model-00001-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    full = load_file(tmp_path / "one" / "model.safetensors")
    assert set(index["weight_map"]) == set(full) and set(index["weight_map"].values()) == set(files)
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / "several" / file)[name], full[name])
    text = [flash_lm.load(tmp_path / x).generate("a cat", 5, temperature=0.0) for x in ("one", "several")]
    assert text[0] == text[1]
    assert load_model(tmp_path / "several").model.parameter_count() == model.model.parameter_count()
    (tmp_path / "several" / files[1]).unlink()
    with pytest.raises(InputError, match="several is damaged"):
        flash_lm.load(tmp_path / "several")


@pytest.mark.slow("trains two runs, and scores a model")
def test_a_run_starts_from_a_model_on_the_hub(hub, tmp_path):
    config = small_config(write_corpus(tmp_path / "text"), tmp_path / "cache", "linear_transformer")
    config.train.update(steps=2, warmup_steps=1, eval_every=0, eval_steps=1, checkpoint_every=0)
    train(config, tmp_path / "parent")
    parent = load_model(tmp_path / "parent")
    write(parent, tmp_path / "out", "mit")
    shutil.copytree(tmp_path / "out", hub.folder / "me" / "mine")
    config.train.update(init_from="hub:me/mine", learning_rate=1e-30, weight_decay=0.0)
    train(config, tmp_path / "child")
    child = load_model(tmp_path / "child")
    assert fingerprint(child.params) == fingerprint(parent.params)
    assert child.facts["parent"]["run"] == str(tmp_path / "parent")
    (score,) = evaluate_hub_model("hub:me/mine", config)
    assert score["run"] == "me/mine@0123456789ab" and score["perplexity"] > 1
    config.train.init_from = "hub:me/other"
    with pytest.raises(InputError, match="there is no model me/other on the hub, or no access to it"):
        train(config, tmp_path / "orphan")
    assert not (tmp_path / "orphan").exists()


def evaluate_hub_model(name, config):
    return scoring.evaluate(download(name), "validation", overrides=[f"--config.data.path={config.data.path}"])
