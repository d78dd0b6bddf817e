"""MNIST pixel by pixel for two cores, meant for half an hour: 4 layers of 128, as configs/mnist.py else.

python -m flash_lm.train --config=configs/mnist_small.py --config.data.path=$DATA/mnist --workdir=runs/mnist_small
"""

from ml_collections import ConfigDict

from configs import mnist


def get_config() -> ConfigDict:
    config = mnist.get_config()
    config.model.update(num_layers=4, model_dim=128)
    config.train.update(
        steps=2400,
        learning_rate=2e-3,
        schedule="linear",
        warmup_steps=200,
        eval_every=300,
        eval_steps=20,
        checkpoint_every=300,
        log_every=20,
    )
    return config
