"""Exports a trained model as a folder that `flash_lm.load`, and others, read: see `training/exported.py`."""

import json
import os
import pathlib
import tempfile
from typing import Any

import jax
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from flash_lm.data.hf_tokenizer import to_hugging_face
from flash_lm.data.tokenizers import save_tokenizer
from flash_lm.errors import InputError
from flash_lm.inference.trained_model import TrainedModel
from flash_lm.jsonl import Line, read_jsonl
from flash_lm.provenance import provenance
from flash_lm.tables import CORPORA, TASKS
from flash_lm.training import workdir as run_folder
from flash_lm.training.exported import WEIGHTS, is_export, of_trained, write_weights
from flash_lm.training.hosts import fetched, is_first, of_all_hosts

# Of a line of results: what is told in the card, and its name there.
_METRICS = {"perplexity": "perplexity a token", "bits_per_byte": "bits a byte", "accuracy": "accuracy"}


def export(trained: TrainedModel, out: pathlib.Path, license_: str) -> list[str]:
    """Writes parameters, config, tokenizer and a model card; the folder is there whole, or not at all.

    Args:
        trained: the model, in the dtype in which it is to be written.
        out: the folder; must be new.
        license_: as the Hugging Face hub names it, for the card.

    Returns:
        Sentences on what could not be written.

    Raises:
        InputError: the folder is there already, the model is an export itself, or there is no licence.
    """
    if is_export(trained.run.workdir):
        raise InputError(f"{trained.run} is an exported model already: copy the folder")
    if not license_.strip():
        raise InputError("--license is empty: name the licence of the model, such as apache-2.0 or other")
    if of_all_hosts(out.exists() or out.is_symlink())[0]:
        raise InputError(f"--out={out} exists: name a new folder")
    arrays = of_trained(jax.tree.map(fetched, trained.params), trained.model.constants)
    if not is_first():
        return []
    theirs, told = to_hugging_face(trained.tokenizer), []
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        partial = pathlib.Path(folder) / "export"
        partial.mkdir()
        write_weights(partial / WEIGHTS, arrays)
        about = json.dumps(_config(trained), indent=2, ensure_ascii=False)
        (partial / "config.json").write_text(f"{about}\n", encoding="utf-8")
        save_tokenizer(trained.tokenizer, partial / "tokenizer")
        if isinstance(theirs, str):
            told.append(f"there is no tokenizer.json: {theirs}")
        else:
            theirs.save(str(partial / "tokenizer.json"))
        _card(trained, out.name, license_).save(partial / "README.md")
        try:
            os.rename(partial, out)
        except OSError as error:
            raise InputError(f"--out={out} cannot be written: {error.strerror}") from None
    return told


def _config(trained: TrainedModel) -> dict[str, Any]:
    """Keys that other tools look for, what made the model, and its config."""
    raw, model = run_folder.read_config(trained.run.workdir), trained.config.model
    raw.model.update(dtype=model.dtype, param_dtype=model.param_dtype, vocab_size=model.vocab_size)
    return {
        "architectures": ["FlashLM"],
        "model_type": "flash_lm",
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "num_hidden_layers": model.num_layers,
        "bos_token_id": trained.tokenizer.begin,
        "eos_token_id": trained.tokenizer.end,
        "flash_lm": {
            "run": str(trained.run),
            "step": trained.step,
            "config_hash": run_folder.hash_of_config(trained.run.workdir),
            "facts": trained.facts,
            "exported_by": provenance(jax.devices()[0].device_kind),
        },
        "config": raw.to_dict(),
    }


def _card(trained: TrainedModel, name: str, license_: str) -> ModelCard:
    config, lines = trained.config, _results(trained)
    example = _example(trained)
    measured = [
        EvalResult(
            task_type="text-generation" if TASKS[config.task].causal else "fill-mask",
            dataset_type=line["corpus"],
            dataset_name=f"{line['corpus']}, {line['split']}",
            metric_type=key,
            metric_name=f"{what}, rows of {line['length']}",
            metric_value=line[key],
        )
        for line in lines
        for key, what in _METRICS.items()
        if key in line
    ]
    data = ModelCardData(
        license=license_,
        library_name="flash_lm",
        pipeline_tag=example[0] if example else None,
        tags=["jax", "flax", config.model.label, config.task],
        model_name=name,
        eval_results=measured or None,
    )
    code, parent = trained.facts.get("code", {}), trained.facts.get("parent")
    rows = [f"| {line['split']} | {line['length']} | {_figures(line)} |" for line in lines]
    table = ["| split | length | scores |", "| :-- | --: | :-- |", *rows] if rows else ["It has not been scored."]
    saved_dtype = run_folder.read_config(trained.run.workdir).model.param_dtype
    if rows and saved_dtype != config.model.param_dtype:
        table.append(f"\nThese are of the parameters in {saved_dtype}, before they were rounded.")
    source = ", ".join(str(x) for x in (config.data.corpus, config.data.name, config.data.config) if x)
    use = [f'model = flash_lm.load("path/to/{name}")', *([f"print(model.{example[1]})"] if example else [])]
    origin = f"- **Begun with** the parameters of `{parent['run']}`, step {parent['step']}.\n" if parent else ""
    text = f"""---
{data.to_yaml()}
---

# {name}

A language model of family `{config.model.label}` with {trained.model.parameter_count():,} parameters in
{config.model.param_dtype}, trained with `task={config.task}` by flash_lm.

```python
import flash_lm

{chr(10).join(use)}
```

- **Data**: corpus `{source}`, fingerprint `{trained.facts.get("corpus", "unknown")[:12]}`; tokenizer
  `{trained.tokenizer.kind}` of {trained.tokenizer.vocab_size:,} tokens.
- **Training**: {trained.step:,} steps of {config.data.tokens_per_batch:,} tokens in rows of {config.data.length},
  seed {config.seed}; {code.get("versions", "versions unknown")}; commit {code.get("git", "unknown")}.
{origin}
## Scores

{chr(10).join(table)}
"""
    return ModelCard(text)


def _results(trained: TrainedModel) -> list[Line]:
    """The newest lines of this checkpoint, of the run's own corpus as it was trained on, a split and length each."""
    path, pack = trained.run.workdir / "results.jsonl", trained.config.data.pack
    lines = read_jsonl(path) if path.exists() else []
    mine = [x for x in lines if x["step"] == trained.step and x.get("own_corpus", True) and x.get("pack", pack) == pack]
    return list({(x["split"], x["length"]): x for x in mine}.values())


def _figures(line: Line) -> str:
    return ", ".join(f"{what} {line[key]:.4g}" for key, what in _METRICS.items() if key in line)


def _example(trained: TrainedModel) -> tuple[str, str] | None:
    """The hub's name for what the model does, and a call that shows it; None: nothing with text."""
    if TASKS[trained.config.task].answers == "fill_in":
        return "fill-mask", 'fill_in("one [MASK]")'
    of_text = CORPORA[trained.config.data.corpus].answers == "text"
    return ("text-generation", 'generate("Once upon")') if of_text and TASKS[trained.config.task].answers else None
