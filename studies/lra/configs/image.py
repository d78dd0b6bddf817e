"""The image task of Long Range Arena: grey CIFAR-10, 1024 pixels per sequence, 200 epochs in batches of 256; for a GPU.

    python -m flash_lm.train --config=studies/lra/configs/image.py --config.data.path=$DATA/cifar

`data.path` has train/LABEL/NAME.png and test/LABEL/NAME.png, or MNIST's idx files (then set model.max_length=785). A
copy of CIFAR-10 in JPEG files is not the original: say so with its figures. The published attention is 64 wide, half of
ours. Its 35,000 steps see all of the training images, and it has a hidden layer before the labels.
"""

from ml_collections import ConfigDict

from flash_lm.configs import base

_TRAINING = 50_000 - 50_000 // 12  # images: a twelfth is held out for validation


def get_config() -> ConfigDict:
    config = base.get_config()
    config.task = "classify"
    config.model.update(
        family="transformer", num_layers=1, model_dim=128, num_heads=8, mlp_dim=128, max_length=1025, dropout=0.3
    )
    config.model.classes.pool = "first"
    config.data.update(corpus="images", pack="examples", path="cifar", tokens_per_batch=256 * 1025)
    config.data.images.gray = True
    steps = 200 * _TRAINING // 256
    config.train.update(
        steps=steps, warmup_steps=175, learning_rate=5e-4, schedule="cosine", eval_every=500, checkpoint_every=500
    )
    return config
