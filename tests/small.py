"""A small corpus and a small run for the tests that train."""

import contextlib
import importlib.util
import json
import os
import pathlib
import random
import stat
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType

import jax
from ml_collections import ConfigDict

from flash_lm.cli.load import packaged_configs
from flash_lm.configs.base import get_config
from flash_lm.families.family import FAMILIES

ROOT = pathlib.Path(__file__).parent.parent
GENERATED = ("CLAIMS.md", "findings.md", "caption.md")  # pages or parts of pages that a program writes
_WORDS = [
    "the",
    "a",
    "cat",
    "dog",
    "sees",
    "hears",
    "ünder",
    "naïve",
    "猫",
    "quick",
    "tree",
    "12",
    "def",
    "(x)",
    ",",
    ".",
]


def config_names() -> list[str]:
    """The configs of the package: FILE, or FILE:NAME for each preset of a file."""
    named = packaged_configs().items()
    return [f"{file}:{preset}" if preset else file for file, presets in named for preset in presets or [""]]


def study_configs() -> list[str]:
    """The config files of studies, from the repository's root."""
    globs = ("*/config.py", "*/configs/[!_]*.py")
    return sorted(str(path.relative_to(ROOT)) for glob in globs for path in (ROOT / "studies").glob(glob))


def pages() -> list[pathlib.Path]:
    """README, the pages of docs/, and those of studies and benchmarks."""
    paths = [path for folder in ("studies", "benchmarks") for path in sorted((ROOT / folder).rglob("*.md"))]
    written = [path for path in paths if "results" not in path.parts and path.name not in GENERATED]
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *written]


def load_script(name: str, folder: str = "scripts") -> ModuleType:
    """Loads a program that is in no package as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_corpus(folder: pathlib.Path, documents: int = 12, lines: int = 30, seed: int = 0) -> str:
    """Writes text files of random lines; returns the glob that matches them."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    for i in range(documents):
        text = "\n".join(" ".join(draw.choices(_WORDS, k=draw.randint(1, 12))) for _ in range(draw.randint(1, lines)))
        (folder / f"{i:02}.txt").write_text(text + "\n", encoding="utf-8")
    return str(folder / "*.txt")


def write_pairs(folder: pathlib.Path, pairs: list[tuple[str, str]]) -> pathlib.Path:
    """Writes the same pairs, in columns `de` and `en`, for each split."""
    folder.mkdir()
    for split in ("train", "validation", "test"):
        lines = "".join(json.dumps({"de": a, "en": b}) + "\n" for a, b in pairs)
        (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return folder


@contextlib.contextmanager
def check_permissions(folder: pathlib.Path, mask: int = 0o027) -> Iterator[None]:
    """Sets the umask; at the end, checks that all files in a new folder have its permissions."""
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}
    assert len(modes) > 1
    assert modes == {path: (0o777 if path.is_dir() else 0o666) & ~mask for path in modes}


@contextlib.contextmanager
def allow_promotion() -> Iterator[None]:
    """Allows jax's usual promotion of dtypes and ranks, in all threads."""
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    try:
        yield
    finally:
        jax.config.update("jax_numpy_dtype_promotion", "strict")
        jax.config.update("jax_numpy_rank_promotion", "raise")


def documents(corpus, split: str) -> list[str]:
    """The texts of a split, each joined from its pieces."""
    texts = []
    for piece in corpus.pieces(split):
        if piece.begins_document:
            texts.append("")
        texts[-1] += piece.text
    return texts


def small_config(path: str, cache: pathlib.Path, family: str = "transformer_plus_plus") -> ConfigDict:
    """A model of one layer on bytes, of a family that compiles fast; eight sequences per batch, one per fake device."""
    config = get_config()
    config.model.update(
        family=family,
        num_layers=1,
        model_dim=16,
        num_heads=2,
        gau={"shared_dim": 8},
        chunks={"size": 8},
        linear={"chunk_size": 8},
        max_length=32,
        init="lecun",
        scale_init="as_init",  # gated units have a visible effect from the start
        dropout=0.1,
    )
    config.data.update(corpus="text", path=path, tokenizer="bytes", tokens_per_batch=256, cache_dir=str(cache))
    config.train.update(
        steps=12, warmup_steps=2, log_every=1, eval_every=4, checkpoint_every=3, loss_chunk=64, learning_rate=1e-2
    )
    return config


def text_tasks(family: str) -> list[str]:
    """The text tasks whose objective a family supports."""
    forms = {"causal_lm": "causal", "masked_lm": "bidirectional"}
    return [task for task, form in forms.items() if form in FAMILIES[family].serves]


def override_flags(config: ConfigDict) -> list[str]:
    """The flags that turn a command's config into this one, except for the mesh."""
    values = {group: config[group].to_dict() for group in ("model", "data", "train")}
    return [f"--config.{key}={value}" for key, value in flat(values).items() if value is not None]


def flat(values: dict, prefix: str = "") -> dict:
    """Nested keys as dotted ones."""
    dotted = {}
    for key, value in values.items():
        dotted |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return dotted


def command(module: str, *arguments: str, devices: int = 1, **popen) -> subprocess.Popen:
    """Starts a command of the package in a separate process, with so many devices."""
    return python("-m", module, *arguments, devices=devices, **popen)


def python(*words: str, devices: int, **popen) -> subprocess.Popen:
    """Starts Python with the compiler flags of the tests; of two equal flags the last one counts."""
    environment = popen.pop("env", os.environ) | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}",
    }
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, *words], cwd=ROOT, env=environment, **pipes, **popen)


def finish(process: subprocess.Popen, code: int = 0) -> tuple[str, str]:
    """Waits for a process, which must end with this exit code; returns its output and errors."""
    out, err = process.communicate(timeout=300)
    assert process.returncode == code, err
    return out, err
