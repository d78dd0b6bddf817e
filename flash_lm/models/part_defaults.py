"""What open keys of a part of a layer become: by the width of the model, and by what a new unit adds."""

from collections.abc import Callable, Mapping

from flash_lm.config.model import ModelConfig
from flash_lm.layers.attention import GAUOptions


def times(numerator: int, denominator: int = 1) -> Callable[[ModelConfig], int]:
    """A multiple of D; a fraction is rounded up to a multiple of 8."""
    if denominator == 1:
        return lambda config: numerator * config.model_dim
    return lambda config: -(-numerator * config.model_dim // denominator // 8) * 8


def of_heads(numerator: int, denominator: int) -> Callable[[ModelConfig], int]:
    """A fraction of D for all heads together, each rounded up to a whole width."""
    return lambda config: config.num_heads * -(-numerator * config.model_dim // (denominator * config.num_heads))


# Units whose small scores leave little: softmax divides by its own sum, and where no weight is divided, the Laplace
# function's 0.006 of a zero adds up over the keys. Scores of dense queries and keys are small if N divides them.
_LEAVES_LITTLE: Mapping[str, Callable[[GAUOptions], bool]] = {
    "weights": lambda gau: gau.attention_function != "softmax" and gau.query_key != "dense",
    "scores": lambda gau: gau.attention_function == "relu2",
}


def gated_residual_init(config: ModelConfig) -> str:
    """By what a new unit adds: next to nothing if its maps are small, or its scores are and leave little.

    Cross attention beside it adds much, whatever the unit does.
    """
    low = config.scale_init == "normal" and _LEAVES_LITTLE[str(config.divides)](config[GAUOptions])
    small = config.encoder is None and (config.init == "normal" or low)
    return "as_init" if small else "depth"
