"""MNIST pixel by pixel: 4 layers of 128 and batches of 4 images, as configs/mnist.py else; 23 minutes on one core.

python -m flash_lm.train --config=configs/mnist_small.py --config.data.path=$DATA/mnist --workdir=runs/mnist_small
"""

from ml_collections import ConfigDict

from configs import mnist


def get_config() -> ConfigDict:
    config = mnist.get_config()
    config.model.update(num_layers=4, model_dim=128)
    config.data.tokens_per_batch = 4 * 784
    config.train.update(
        steps=4000,
        learning_rate=2e-3,
        schedule="linear",
        warmup_steps=200,
        eval_every=500,
        eval_steps=50,
        checkpoint_every=500,
        log_every=50,
    )
    return config
