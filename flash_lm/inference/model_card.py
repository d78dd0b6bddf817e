"""The card of an exported model: what it is, what it was trained on, how it was scored, and how to load it."""

from typing import NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from flash_lm.config.registry import CORPORA
from flash_lm.inference.model import TrainedModel
from flash_lm.runs.jsonl import Line, read_lines

# Key of a result line -> its name in the card.
_OF_TOKENS = {"perplexity": "perplexity a token", "bits_per_byte": "bits a byte", "accuracy": "accuracy"}
_OF_LABELS = {
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "matthews": "Matthews' correlation",
    "majority": "share of the most frequent label",
}


# What a model writes -> the hub's name for that, and an example call.
_EXAMPLES: dict[str | None, tuple[str, str]] = {
    "fill_in": ("fill-mask", 'fill_in("one [MASK]")'),
    "label": ("text-classification", 'classify(["Once upon"])'),
    "text": ("text-generation", 'generate("Once upon")'),
}


class Library(NamedTuple):
    """A library that loads a model.

    Attributes:
        name: of the library.
        on_hub: what it calls the model {name} of the hub; None: it needs a folder.
        load: code, with the {place} of the model.
        call: code, with an example {call}.
    """

    name: str
    on_hub: str | None
    load: str
    call: str


FLASH_LM = Library(
    "flash_lm", "hub:{name}", 'import flash_lm\n\nmodel = flash_lm.load("{place}")', "print(model.{call})"
)
TRANSFORMERS = Library(
    "transformers",
    "{name}",
    """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{place}")
tokenizer = AutoTokenizer.from_pretrained("{place}")""",
    """ids = tokenizer("Once upon", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))""",
)
JAX = Library(
    "jax",
    None,
    """import pathlib

import numpy as np
from jax import export
from safetensors.numpy import load_file

folder = pathlib.Path("{place}")
params = load_file(folder / "model.safetensors")
start, prefill, step = (
    export.deserialize((folder / f"{{each}}.stablehlo").read_bytes()).call for each in ("start", "prefill", "step")
)""",
    """state = start(params)
tokens = np.zeros((ROWS, PROMPT_TOKENS_AT_A_TIME), np.int32)  # these sizes are in config.json; ids from tokenizer.json
lengths = np.array([1] * ROWS, np.int32)  # how many of each row's tokens are real
logits, state = prefill(params, state, tokens, lengths)
logits, state = step(params, state, logits.argmax(axis=-1).astype(np.int32))""",
)


def model_card(
    trained: TrainedModel, name: str, license_: str, library: Library, on_hub: str | None = None
) -> ModelCard:
    """Makes a model's card.

    Args:
        trained: the model, in the dtype in which it is written.
        name: its folder's name.
        license_: the licence, as the Hugging Face hub names it.
        library: the library that loads the model.
        on_hub: its OWNER/NAME there; None: it is a folder.
    """
    place = library.on_hub.format(name=on_hub) if on_hub and library.on_hub else f"path/to/{name}"
    config, lines = trained.config, _results(trained)
    example = _example(trained)
    measured = [
        EvalResult(
            task_type=_task_type(trained),
            dataset_type=line["corpus"],
            dataset_name=f"{line['corpus']}, {line['split']}",
            metric_type=key,
            metric_name=f"{what}, rows of {line['length']}",
            metric_value=line[key],
        )
        for line in lines
        for key, what in _metrics(line).items()
    ]
    data = ModelCardData(
        license=license_,
        library_name=library.name,
        pipeline_tag=example[0] if example else None,
        tags=["jax", "flax", config.model.label, config.task],
        model_name=name,
        eval_results=measured or None,
    )
    rows = [f"| {line['split']} | {line['length']} | {_figures(line)} |" for line in lines]
    table = ["| split | length | scores |", "| :-- | --: | :-- |", *rows] if rows else ["It has not been scored."]
    saved_dtype = trained.folder.config.model.param_dtype
    if rows and saved_dtype != config.model.param_dtype:
        table.append(f"\nThese are of the parameters in {saved_dtype}, before they were rounded.")
    use = [library.load, *([library.call] if example else [])]
    call = example[1] if example else ""
    text = f"""---
{data.to_yaml()}
---

# {name}

A {_kind(trained)} of family `{config.model.label}` with {trained.model.parameter_count():,} parameters in
{config.model.param_dtype}{"" if trained.imported_from else f", trained with `task={config.task}` by flash_lm"}.

```python
{chr(10).join(use).format(place=place, call=call)}
```

{_origin(trained)}

## Scores

{chr(10).join(table)}
"""
    return ModelCard(text)


def _kind(trained: TrainedModel) -> str:
    return f"classifier into {len(trained.labels)} labels," if trained.labels else "language model"


def _origin(trained: TrainedModel) -> str:
    """Where the model comes from, as a Markdown list."""
    config, facts = trained.config, trained.facts
    kind, words = trained.tokenizer.kind, trained.tokenizer.vocab_size
    if trained.imported_from:
        return f"- **Read** by flash_lm from `{trained.imported_from}`; tokenizer `{kind}` of {words:,} tokens."
    code, parent = facts.get("code", {}), facts.get("parent")
    source = ", ".join(str(x) for x in (config.data.corpus, config.data.name, config.data.config) if x)
    begun = f"\n- **Begun with** the parameters of `{parent['run']}`, step {parent['step']}." if parent else ""
    return f"""- **Data**: corpus `{source}`, fingerprint `{facts.get("corpus", "unknown")[:12]}`; tokenizer
  `{kind}` of {words:,} tokens.
- **Training**: {trained.step:,} steps of {config.data.tokens_per_batch:,} tokens in rows of {config.data.length},
  seed {config.seed}; {code.get("versions", "versions unknown")}; commit {code.get("git", "unknown")}.{begun}"""


def _results(trained: TrainedModel) -> list[Line]:
    """This checkpoint's newest result for each split and length, on the run's own corpus and packing."""
    path, pack = trained.run.workdir / "results.jsonl", trained.config.data.pack
    lines = read_lines(path)
    mine = [x for x in lines if x["step"] == trained.step and x.get("own_corpus", True) and x.get("pack", pack) == pack]
    return list({(x["split"], x["length"]): x for x in mine}.values())


def _figures(line: Line) -> str:
    return ", ".join(f"{what} {line[key]:.4g}" for key, what in _metrics(line).items())


def _metrics(line: Line) -> dict[str, str]:
    """The names of what a line has, by key."""
    names = _OF_LABELS if "macro_f1" in line else _OF_TOKENS
    return {key: what for key, what in names.items() if key in line}


def _example(trained: TrainedModel) -> tuple[str, str] | None:
    """The hub's name for the model's task, and an example call; None: the model does not generate text."""
    if trained.labels and CORPORA[trained.config.data.corpus].answers != "text":
        return None
    return _EXAMPLES.get(trained.writes)


def _task_type(trained: TrainedModel) -> str:
    """The hub's name for what was scored."""
    if trained.labels:
        return "text-classification"
    return "text-generation" if trained.task.causal else "fill-mask"
