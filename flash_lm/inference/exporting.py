"""Exports a trained model as a folder that `flash_lm.load`, and others, read: see `training/exported.py`."""

import json
import os
import pathlib
import shutil
from typing import Any

import jax
from huggingface_hub import EvalResult, ModelCard, ModelCardData

from flash_lm.data.hf_tokenizer import to_hugging_face
from flash_lm.data.tokenizers import save_tokenizer
from flash_lm.errors import InputError
from flash_lm.inference.trained_model import TrainedModel
from flash_lm.jsonl import Line, read_jsonl
from flash_lm.provenance import provenance
from flash_lm.tables import TASKS
from flash_lm.training import workdir as run_folder
from flash_lm.training.exported import WEIGHTS, is_export, of_trained, write_weights
from flash_lm.training.hosts import fetched, is_first

# Of a line of results: what is told in the card, and its name there.
_METRICS = {"perplexity": "perplexity a token", "bits_per_byte": "bits a byte", "accuracy": "accuracy"}
_PIPELINES = {"continue": "text-generation", "fill_in": "fill-mask"}  # of what a task's models answer


def export(trained: TrainedModel, out: pathlib.Path, license_: str) -> list[str]:
    """Writes parameters, config, tokenizer and a model card; the folder is there whole, or not at all.

    Args:
        trained: the model, in the dtype in which it is to be written.
        out: the folder; must be new.
        license_: as the Hugging Face hub names it, for the card.

    Returns:
        Sentences on what could not be written.

    Raises:
        InputError: the folder is there already, or the model is an export itself.
    """
    if is_export(trained.run.workdir):
        raise InputError(f"{trained.run} is an exported model already: copy the folder")
    if out.exists():
        raise InputError(f"--out={out} exists: name a new folder")
    arrays = of_trained(jax.tree.map(fetched, trained.params), trained.model.constants)
    if not is_first():
        return []
    partial, told = out.with_name(f"{out.name}.partial"), []
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    write_weights(partial / WEIGHTS, arrays)
    (partial / "config.json").write_text(json.dumps(_config(trained), indent=2, ensure_ascii=False) + "\n", "utf-8")
    save_tokenizer(trained.tokenizer, partial / "tokenizer")
    theirs = to_hugging_face(trained.tokenizer)
    if isinstance(theirs, str):
        told.append(f"there is no tokenizer.json: {theirs}")
    else:
        theirs.save(str(partial / "tokenizer.json"))
    _card(trained, license_).save(partial / "README.md")
    os.replace(partial, out)
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


def _card(trained: TrainedModel, license_: str) -> ModelCard:
    config, name = trained.config, trained.name
    lines = _results(trained)
    measured = [
        EvalResult(
            task_type=_PIPELINES.get(TASKS[config.task].answers or "", "text-generation"),
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
        pipeline_tag=_PIPELINES.get(TASKS[config.task].answers or ""),
        tags=["jax", "flax", config.model.label, config.task],
        model_name=name,
        eval_results=measured or None,
    )
    code = trained.facts.get("code", {})
    rows = [f"| {line['split']} | {line['length']} | {_figures(line)} |" for line in lines]
    table = ["| split | length | scores |", "| :-- | --: | :-- |", *rows] if rows else ["It has not been scored."]
    use = f'model = flash_lm.load("{name}")\nprint(model.{_example(trained)})'
    text = f"""---
{data.to_yaml()}
---

# {name}

A language model of family `{config.model.label}` with {trained.model.parameter_count():,} parameters, trained with
`task={config.task}` by flash_lm.

```python
import flash_lm

{use}
```

- **Data**: corpus `{config.data.corpus}`, fingerprint `{trained.facts.get("corpus", "unknown")[:12]}`; tokenizer
  `{trained.tokenizer.kind}` of {trained.tokenizer.vocab_size:,} tokens.
- **Training**: {trained.step:,} steps of {config.data.tokens_per_batch:,} tokens in rows of {config.data.length},
  seed {config.seed}; {code.get("versions", "versions unknown")}; commit {code.get("git", "unknown")}.

## Scores

{chr(10).join(table)}
"""
    return ModelCard(text)


def _results(trained: TrainedModel) -> list[Line]:
    """The newest lines of this checkpoint, of the run's own corpus, a split and length each."""
    path = trained.run.workdir / "results.jsonl"
    lines = read_jsonl(path) if path.exists() else []
    mine = [x for x in lines if x["step"] == trained.step and x.get("own_corpus", True)]
    return list({(x["split"], x["length"]): x for x in mine}.values())


def _figures(line: Line) -> str:
    return ", ".join(f"{what} {line[key]:.4g}" for key, what in _METRICS.items() if key in line)


def _example(trained: TrainedModel) -> str:
    return 'fill_in("one [MASK]")' if TASKS[trained.config.task].answers == "fill_in" else 'generate("Once upon")'
