"""Exports a trained model as a folder that `flash_lm.load` and other tools read: see `training/export_folder.py`.

Other formats: a folder for another library, if it has the same model, see `models/formats`; or compiled functions that
need only jax, see `inference/stablehlo.py`.
"""

import os
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from flash_lm.config.registry import FORMATS
from flash_lm.data.hf_tokenizer import to_hugging_face
from flash_lm.data.tokenizers import save_tokenizer
from flash_lm.errors import InputError
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.model_card import FLA, FLASH_LM, JAX, TRANSFORMERS, Library, model_card
from flash_lm.inference.stablehlo import Sizes, check_programs, describe_programs, write_programs
from flash_lm.models.formats.arrays import from_params
from flash_lm.models.formats.settings import to_settings, write_problems
from flash_lm.runs.hosts import fetch_array, gather_from_hosts, is_first
from flash_lm.runs.labels import write_labels
from flash_lm.runs.provenance import provenance
from flash_lm.runs.run_folder import is_export
from flash_lm.runs.storage import reach
from flash_lm.training.export_folder import flatten_arrays, new_folder, write_json, write_weights
from flash_lm.training.train_state import Params


class Export(NamedTuple):
    """How a model is written in a format.

    Attributes:
        check: raises InputError if a model cannot be written in this format.
        arrays: function (parameters, constants), on the host -> arrays by name.
        settings: function (model) -> config.json, without its provenance.
        library: the library that loads the model.
        write: function (model, its tokenizer for `tokenizers` or why it has none, folder) that writes all other files.
        native: whether `flash_lm.load` reads the folder.
    """

    check: Callable[[TrainedModel], None]
    arrays: Callable[[Params, Params], dict[str, Any]]
    settings: Callable[[TrainedModel], dict[str, Any]]
    library: Library
    write: Callable[[TrainedModel, Any, pathlib.Path], None]
    native: bool = False


def check_export(
    trained: TrainedModel, out: pathlib.Path, license_: str, form: str = "flash_lm", sizes: Sizes | None = None
) -> None:
    """Raises InputError if `export` would, for the same arguments, before anything is written."""
    # An export of an export in the same dtype would be only a copy.
    kind = find_export(form, sizes or Sizes())
    saved_dtype = trained.folder.config.model.param_dtype
    if kind.native and is_export(trained.run.workdir) and saved_dtype == trained.config.model.param_dtype:
        raise InputError(f"{trained.run} is already an exported model: copy the folder, or give another --dtype")
    if not license_.strip():
        raise InputError("--license is empty: give the model's licence, such as apache-2.0 or other")
    if gather_from_hosts(reach(out).exists() or os.path.lexists(out))[0]:
        raise InputError(f"--out={out} already exists: give a new folder")
    kind.check(trained)


def export(
    trained: TrainedModel,
    out: pathlib.Path,
    license_: str,
    form: str = "flash_lm",
    sizes: Sizes | None = None,
    on_hub: str | None = None,
) -> list[str]:
    """Writes parameters, config, tokenizer and a model card; writes the folder completely or not at all.

    Args:
        trained: the model, in the dtype to write.
        out: the folder; must not exist yet.
        license_: the licence for the card, as the Hugging Face hub names it.
        form: flash_lm, stablehlo, or the name of a format of another library.
        sizes: shapes of the programs of form="stablehlo"; None: the default ones.
        on_hub: OWNER/NAME for the card's example; None: it loads a folder.

    Returns:
        Sentences on files that could not be written.

    Raises:
        InputError: the folder exists, the model is already such an export, the licence is empty, or the format cannot
            express the model.
    """
    # All hosts fetch the parameters together; only the first one writes.
    check_export(trained, out, license_, form, sizes)
    kind = find_export(form, sizes or Sizes())
    params = jax.tree.map(fetch_array, trained.params)
    if not is_first():
        return []

    # A temporary folder gets its name only when all files are complete.
    hf_tokenizer, messages = to_hugging_face(trained.tokenizer), []
    with new_folder(out) as partial:
        write_weights(partial, kind.arrays(params, trained.model.constants))
        write_json(partial / "config.json", kind.settings(trained) | {"flash_lm": _export_origin(trained)})
        kind.write(trained, hf_tokenizer, partial)
        if isinstance(hf_tokenizer, str):
            messages.append(f"there is no tokenizer.json: {hf_tokenizer}")
        else:
            hf_tokenizer.save(str(partial / "tokenizer.json"))
        model_card(trained, out.name, license_, kind.library, on_hub).save(partial / "README.md")
    return messages


def _export_origin(trained: TrainedModel) -> dict[str, Any]:
    return {
        "run": str(trained.run),
        "step": trained.step,
        "config_hash": trained.folder.hash,
        "facts": trained.facts,
        "exported_by": provenance(jax.devices()[0].device_kind),
    }


def _special_token_ids(trained: TrainedModel) -> dict[str, int]:
    return {"bos_token_id": trained.tokenizer.begin, "eos_token_id": trained.tokenizer.end}


def _our_settings(trained: TrainedModel) -> dict[str, Any]:
    """config.json: the keys that other tools look for, and the run's config."""
    # The config as it was trained, with the dtype of this export and the vocabulary filled in.
    raw, model = trained.folder.config.copy_and_resolve_references(), trained.config.model
    raw.model.update(dtype=model.dtype, param_dtype=model.param_dtype, vocab_size=model.vocab_size)
    return {
        "architectures": ["FlashLM"],
        "model_type": "flash_lm",
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "num_hidden_layers": model.num_layers,
        **_special_token_ids(trained),
        "config": raw.to_dict(),
    }


def _write_ours(trained: TrainedModel, hf_tokenizer: Any, folder: pathlib.Path) -> None:
    del hf_tokenizer
    save_tokenizer(trained.tokenizer, folder / "tokenizer")
    write_labels(folder, trained.labels)


def _check_format(trained: TrainedModel, name: str) -> None:
    reads_forward = trained.conditioning.scores_full_text
    why = write_problems(FORMATS[name], trained.config.model) if reads_forward else [f"task={trained.config.task}"]
    if why:
        raise InputError(
            f"{trained.run} cannot be written as {name} ({', '.join(why)}): omit --format, or give another"
        )


def _write_for_transformers(trained: TrainedModel, hf_tokenizer: Any, folder: pathlib.Path) -> None:
    """Writes the files that transformers' generation and tokenizer read."""
    # Generation needs the ids of begin-of-text and end-of-text, the tokenizer their texts.
    write_json(folder / "generation_config.json", _special_token_ids(trained))
    if isinstance(hf_tokenizer, str):
        return
    words = {
        f"{name}_token": hf_tokenizer.id_to_token(i)
        for name, i in (("bos", trained.tokenizer.begin), ("eos", trained.tokenizer.end))
    }
    if not getattr(trained.tokenizer, "has_begin", True):  # what texts begin with is no begin-of-text for a template
        words["bos_token"] = None
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **words}
    if template := getattr(trained.tokenizer, "chat_template", None):
        about["chat_template"] = template
    write_json(folder / "tokenizer_config.json", about | {"model_max_length": trained.config.model.max_length})


def find_export(form: str, sizes: Sizes) -> Export:
    """How a format is written; raises InputError: there is no format of this name."""
    if form in OURS:
        return OURS[form](sizes)
    if form not in FORMATS:
        raise InputError(f"--format={form} must be one of {', '.join((*OURS, *FORMATS))}")
    row = FORMATS[form]
    return Export(
        lambda trained: _check_format(trained, form),
        lambda params, constants: from_params(row, params),
        lambda trained: to_settings(row, trained.config.model) | _special_token_ids(trained),
        _LIBRARIES[row.library],
        _write_for_transformers,
    )


_LIBRARIES = {library.name: library for library in (TRANSFORMERS, FLA)}
# Formats of our own, as functions of the sizes of programs, which only one has.
OURS: dict[str, Callable[[Sizes], Export]] = {
    "flash_lm": lambda sizes: Export(
        lambda trained: None, flatten_arrays, _our_settings, FLASH_LM, _write_ours, native=True
    ),
    "stablehlo": lambda sizes: Export(
        check_programs,
        lambda params, constants: flatten_arrays(params, {}),  # constants are in the programs
        lambda trained: describe_programs(trained, sizes) | _special_token_ids(trained),
        JAX,
        lambda trained, hf_tokenizer, folder: write_programs(trained, sizes, folder),
    ),
}
