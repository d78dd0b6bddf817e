"""FOLDER:text and FOLDER:chat, the configs that fine-tune the model of a folder on a user's own data."""

from typing import Any

from flash_lm.config.experiment import default_config
from flash_lm.errors import InputError

# What to train on -> the keys that read it.
PRESETS: dict[str, dict[str, Any]] = {
    "text": {"data.corpus": "text"},
    "chat": {"data.corpus": "chat", "data.pack": "examples"},
}
_OF_MODEL = ("tokenizer", "tokenizer_path", "vocab_size")  # keys of config.data that define the vocabulary
_LONGEST_ROW = 256  # tokens
_MOST_UNROLLED = 32  # layers; more would take minutes to compile
# A rate of a tenth or less of one for training from the start, and few evaluations, each of a part of the split.
_TRAIN = {"steps": 100, "learning_rate": 1e-4, "eval_every": 50, "eval_steps": 16, "checkpoint_every": 50}


def finetune_config(folder: str, model_config: Any, name: str) -> Any:
    """The config of a run that fine-tunes the model of a folder.

    Args:
        folder: the model's folder, for train.init_from.
        model_config: the config there; of it, the model and the vocabulary are taken.
        name: a key of `PRESETS`.

    Raises:
        InputError: no such preset exists.
    """
    if name not in PRESETS:
        raise InputError(
            f"--config={folder}:{name} is not known: a model is fine-tuned with {folder}:text or {folder}:chat"
        )
    config: Any = default_config()
    config.update({key: model_config[key] for key in ("task", "plugins", "model")})
    config.data.update({key: model_config.data[key] for key in _OF_MODEL})
    config.data.length = min(config.model.max_length, _LONGEST_ROW)
    config.data.tokens_per_batch = None  # 2048, or as many more as the devices need
    config.train.update(init_from=folder, **_TRAIN)
    # Small updates would be lost in parameters of bfloat16. Unrolled layers copy nothing for the derivative.
    config.model.param_dtype = "float32"
    config.model.scan_layers = config.model.num_layers > _MOST_UNROLLED
    config.update_from_flattened_dict(PRESETS[name])
    return config
