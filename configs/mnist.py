"""MNIST pixel by pixel ("Transformers are RNNs", section 4.2): 784 bytes per row, a mixture of ten logistics.

    flash-lm train --config=configs/mnist.py --config.data.path=$DATA/mnist --workdir=runs/mnist
    flash-lm evaluate --workdir=runs/mnist --split=test        # bits per byte are bits per pixel

The settings are the paper's: 8 layers, 8 heads, width 256, RAdam at 1e-4, 250 epochs in batches of 10 images. They need
a GPU; `configs/mnist_small.py` is for two cores. For CIFAR-10, use `--config.data.path=
--config.data.name=uoft-cs/cifar10 --config.model.max_length=3072` and adapt the batch size.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base

_IMAGES, _BATCH, _EPOCHS = 55_000, 10, 250


def get_config() -> ConfigDict:
    config = base.get_config()
    config.model.update(
        family="linear_transformer",
        num_layers=8,
        model_dim=256,
        num_heads=8,
        max_length=784,
        head="logistics",
        logistics={"mixtures": 10},
        init="lecun",
    )
    config.data.update(corpus="images", pack="examples", path="mnist", tokens_per_batch=_BATCH * 784)
    config.train.update(
        steps=_EPOCHS * _IMAGES // _BATCH,
        optimizer="radam",
        learning_rate=1e-4,
        schedule="constant",
        warmup_steps=0,
        weight_decay=0.0,
        eval_every=5500,
        eval_steps=100,
        checkpoint_every=5500,
        log_every=100,
    )
    return config
