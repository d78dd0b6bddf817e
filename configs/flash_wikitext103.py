"""FLASH at 43M parameters, causal LM on WikiText-103: the size of table 1 of the TNL paper.

    flash-lm train --config=configs/flash_wikitext103.py

The table has FLASH at a test perplexity of 26.70 and the Transformer at 24.78. Each line is a document of the stream.
The vocabulary and the schedule are ours, so compare perplexity a word with line ends as words (word_perplexity_eos).
The corpus has <unk> for rare words, as the table's has; the raw one is --config.data.config=wikitext-103-raw-v1.
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base


def get_config() -> ConfigDict:
    config = flash_base.get_config()
    config.model.update(num_layers=8, model_dim=512, num_heads=8, max_length=512)
    config.data.update(name="Salesforce/wikitext", config="wikitext-103-v1", tokens_per_batch=2**16)
    config.train.update(steps=50_000, warmup_steps=4_000)
    return config
