"""The encoder of an encoder-decoder model: a stack of layers that shares the model's embedding and has no head."""

import jax
from flax import nnx

from flash_lm.config.model import ModelConfig
from flash_lm.models.layer_stack import LayerStack
from flash_lm.models.model_inputs import ModelInputs


class Encoder(LayerStack):
    """The encoder's layers; the embedding is an argument of the call."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        """Builds the encoder of a config from `encoder_config`."""
        self.config = config
        self._build(rngs=rngs)

    def __call__(self, table_VxD: jax.Array, source: ModelInputs, dropout_key: jax.Array | None) -> jax.Array:
        """The features of a source, B×M×D, from the model's embedding and the source's tokens."""
        x_BxMxD, context = self._embed_rows(table_VxD, source, dropout_key)
        return self._apply_layers(x_BxMxD, context)[0]
