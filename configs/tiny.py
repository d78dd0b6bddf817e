"""The size of a first look: 4 layers of 64, 2048 words.

python -m benchmarks.steps.step_time --size=tiny --out=/tmp/steps
"""

from ml_collections import ConfigDict

from flash_lm.configs import quickstart


def get_config() -> ConfigDict:
    config = quickstart.get_config()
    config.model.update(num_layers=4, model_dim=64, num_heads=4, gau={"shared_dim": 32})
    config.data.vocab_size = 2048
    return config
