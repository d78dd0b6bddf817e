"""The published mix of associative recall: 4 to 64 pairs in sequences of 64 to 256, 8192 words; for a GPU.

    python -m flash_lm.train --config=configs/recall/mqar_published.py --config.model.family=flash
    python -m flash_lm.evaluate --workdir=runs/mqar_published --lengths=1024 --slices=parts

"Simple linear attention language models balance the recall-throughput tradeoff" (Arora et al. 2024, arXiv:2402.18668,
figure 2): 180,000 sequences, 32 epochs in batches of 256, widths of 64 to 512, two layers, AdamW with decay 0.1, four
rates from 1e-3 to 10^-1.5, tests of up to 256 pairs in 1024 tokens. In the paper each layer is a short convolution and
then the mixer, without feed-forward layers and positions. Here families are unchanged, with `model.short_convolution`
if you set it.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base

LONGEST = 1024  # sequence length of the test


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(
        family="transformer_plus_plus", num_layers=2, model_dim=128, num_heads=2, max_length=LONGEST, dropout=0.1
    )
    config.model.update(gau={"shared_dim": 64}, chunks={"size": 32}, window={"size": 32}, linear={"chunk_size": 32})
    config.data.update(corpus="mqar", pack="examples", length=256, tokens_per_batch=256 * 256)
    config.data.mqar.random_filler = False
    config.data.mqar.test = (*config.data.mqar.test, (512, 128, 1000), (LONGEST, 256, 1000))
    epochs, rows = 32, sum(count for _, _, count in config.data.mqar.train)
    config.train.update(
        steps=epochs * rows // 256,
        schedule="cosine",
        learning_rate=3e-3,
        weight_decay=0.1,
        eval_every=700,
        checkpoint_every=700,
        stop_accuracy=0.99,
    )
    return config
