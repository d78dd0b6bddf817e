"""MNIST pixel by pixel: 4 layers of 64 and an image a step, as configs/mnist.py else; 27 minutes on one core.

flash-lm train --config=configs/mnist_small.py --config.data.path=$DATA/mnist --workdir=runs/mnist_small
"""

from ml_collections import ConfigDict

from flash_lm.configs import mnist


def get_config() -> ConfigDict:
    config = mnist.get_config()
    config.model.update(num_layers=4, model_dim=64, num_heads=2)
    config.data.tokens_per_batch = 784
    config.train.update(
        steps=50_000,
        learning_rate=2e-3,
        schedule="linear",
        warmup_steps=200,
        eval_every=5000,
        eval_steps=200,
        checkpoint_every=5000,
        log_every=500,
    )
    return config
