"""The model card of an export: size, training data, scores, and an example that loads it."""

from typing import NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from flash_lm.config.registry import CORPORA
from flash_lm.inference.model import TrainedModel
from flash_lm.runs.jsonl import Line, read_lines

# Key of a result line -> its name in the card.
_TOKEN_METRICS = {"perplexity": "perplexity per token", "bits_per_byte": "bits per byte", "accuracy": "accuracy"}
_LABEL_METRICS = {
    "accuracy": "accuracy",
    "macro_f1": "macro F1",
    "matthews": "Matthews' correlation",
    "majority": "share of the most frequent label",
}


# Kind of output -> the hub's name of the task, and an example call.
_EXAMPLES: dict[str | None, tuple[str, str]] = {
    "fill_in": ("fill-mask", 'fill_in("one [MASK]")'),
    "label": ("text-classification", 'classify(["Once upon"])'),
    "text": ("text-generation", 'generate("Once upon")'),
}


class Library(NamedTuple):
    """A library that loads a model.

    Attributes:
        name: name of the library.
        on_hub: how it names the model {name} on the hub; None: it needs a folder.
        load: code that loads the model from its {location}.
        call: code of an example {call}.
    """

    name: str
    on_hub: str | None
    load: str
    call: str


FLASH_LM = Library(
    "flash_lm", "hub:{name}", 'import flash_lm\n\nmodel = flash_lm.load("{location}")', "print(model.{call})"
)
TRANSFORMERS = Library(
    "transformers",
    "{name}",
    """from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{location}")
tokenizer = AutoTokenizer.from_pretrained("{location}")""",
    """ids = tokenizer("Once upon", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=40)[0]))""",
)
FLA = TRANSFORMERS._replace(
    name="fla", load=f"import fla  # registers its models with transformers\n{TRANSFORMERS.load}"
)
JAX = Library(
    "jax",
    None,
    """import pathlib

import numpy as np
from jax import export
from safetensors.numpy import load_file

folder = pathlib.Path("{location}")
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
        trained: the model, in the dtype of the export.
        name: name of its folder.
        license_: the licence, as the Hugging Face hub names it.
        library: the library that loads the model.
        on_hub: its OWNER/NAME on the hub; None: it is a folder.
    """
    # The metadata that the hub reads, with the scores of this checkpoint.
    location = library.on_hub.format(name=on_hub) if on_hub and library.on_hub else f"path/to/{name}"
    config, lines = trained.config, _results(trained)
    example = _example(trained)
    measured = [
        EvalResult(
            task_type=_task_type(trained),
            dataset_type=line["corpus"],
            dataset_name=f"{line['corpus']}, {line['split']}",
            metric_type=key,
            metric_name=f"{what}, sequence length {line['length']}",
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

    # The page: scores as a table, and the code that loads the model.
    rows = [f"| {line['split']} | {line['length']} | {_format_scores(line)} |" for line in lines]
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

A {_describe_kind(trained)} of family `{config.model.label}` with {trained.model.parameter_count():,} parameters in
{config.model.param_dtype}{"" if trained.imported_from else f", trained with `task={config.task}` by flash_lm"}.

```python
{chr(10).join(use).format(location=location, call=call)}
```

{_describe_origin(trained)}

## Scores

{chr(10).join(table)}
"""
    return ModelCard(text)


def _describe_kind(trained: TrainedModel) -> str:
    return f"classifier into {len(trained.labels)} labels," if trained.labels else "language model"


def _describe_origin(trained: TrainedModel) -> str:
    """Corpus, training and parent of the model, as a Markdown list."""
    # A model of another library has no history of training.
    config, facts = trained.config, trained.facts
    kind, words = trained.tokenizer.kind, trained.tokenizer.vocab_size
    if trained.imported_from:
        return f"- **Read** by flash_lm from `{trained.imported_from}`; tokenizer `{kind}` of {words:,} tokens."
    code, parent = facts.get("code", {}), facts.get("parent")
    source = ", ".join(str(x) for x in (config.data.corpus, config.data.name, config.data.config) if x)
    parent_line = f"\n- **Begun with** the parameters of `{parent['run']}`, step {parent['step']}." if parent else ""
    return f"""- **Data**: corpus `{source}`, fingerprint `{facts.get("corpus", "unknown")[:12]}`; tokenizer
  `{kind}` of {words:,} tokens.
- **Training**: {trained.step:,} steps of {config.data.tokens_per_batch:,} tokens in sequences of {config.data.length},
  seed {config.seed}; {code.get("versions", "versions unknown")}; commit {code.get("git", "unknown")}.{parent_line}"""


def _results(trained: TrainedModel) -> list[Line]:
    """The newest result of this checkpoint per split and length, on the training corpus with the same packing."""
    path, pack = trained.run.workdir / "results.jsonl", trained.config.data.pack
    # A later result of the same split and length replaces an earlier one.
    lines = read_lines(path)
    results = [
        x for x in lines if x["step"] == trained.step and x.get("own_corpus", True) and x.get("pack", pack) == pack
    ]
    return list({(x["split"], x["length"]): x for x in results}.values())


def _format_scores(line: Line) -> str:
    return ", ".join(f"{what} {line[key]:.4g}" for key, what in _metrics(line).items())


def _metrics(line: Line) -> dict[str, str]:
    """Names of the metrics in a line, by key."""
    names = _LABEL_METRICS if "macro_f1" in line else _TOKEN_METRICS
    return {key: what for key, what in names.items() if key in line}


def _example(trained: TrainedModel) -> tuple[str, str] | None:
    """The hub's name of the model's task, and an example call; None: it has no input or output of text."""
    if trained.labels and CORPORA[trained.config.data.corpus].answers != "text":
        return None
    return _EXAMPLES.get(trained.writes)


def _task_type(trained: TrainedModel) -> str:
    """The hub's name of the task that was scored."""
    if trained.labels:
        return "text-classification"
    return "text-generation" if trained.task.causal else "fill-mask"
