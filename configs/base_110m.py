"""Every family at 110M parameters, and hybrids: configs/flash_base.py with other layers, on the same tokens.

    flash-lm train --config=configs/base_110m.py:mamba2

The families of the papers' tables also have files, such as configs/transformer_plus_plus_base.py.
"""

from ml_collections import ConfigDict

from flash_lm.configs import flash_base

PRESETS = {
    # The papers' baselines.
    "transformer": {"model.family": "transformer"},  # learned positions
    "transformer_plus": {"model.family": "transformer_plus"},  # rotary positions
    "transformer_plus_plus": {"model.family": "transformer_plus_plus"},  # rotary positions and a GLU
    # FLASH's families.
    "flash_quad": {"model.family": "flash_quad"},  # GAUs over all pairs of tokens
    "flash": {"model.family": "flash"},
    "mc_tfm": {"model.family": "mc_tfm"},  # MC-TFM++: mixed chunks in a Transformer++
    # AFT's families.
    "aft_full": {"model.family": "aft_full", "model.aft.bias_dim": 256},
    "aft_local": {"model.family": "aft_local", "model.aft.window": 32, "model.aft.bias_dim": 256},
    "aft_simple": {"model.family": "aft_simple"},
    "aft_conv": {"model.family": "aft_conv", "model.aft.window": 32},
    # Linear attention.
    "linear_transformer": {"model.family": "linear_transformer"},
    "performer": {"model.family": "performer"},
    "cosformer": {"model.family": "cosformer"},
    "flowformer": {"model.family": "flowformer"},
    "based": {"model.family": "based"},
    # Softmax attention to some tokens, or to what sums them up.
    "longformer": {"model.family": "longformer"},  # a sliding window
    "window_linear": {"model.family": "window_linear"},  # a sliding window, and sums of learned features beyond it
    "adaptive_span": {"model.family": "adaptive_span"},  # heads learn how far back they look
    "log_sparse": {"model.family": "log_sparse"},  # near tokens, and distances that double
    "reformer": {"model.family": "reformer"},  # tokens with the same hash
    "linformer": {"model.family": "linformer", "task": "masked_lm"},  # 128 slots; it has no causal form
    "nystromformer": {"model.family": "nystromformer", "task": "masked_lm"},  # 64 landmarks; it has no causal form
    "transformer_xl": {"model.family": "transformer_xl"},
    # Sums that forget, and convolutions.
    "retnet": {"model.family": "retnet"},
    "gla": {"model.family": "gla"},
    "mamba2": {"model.family": "mamba2"},
    "gated_deltanet": {"model.family": "gated_deltanet"},
    "deltanet": {"model.family": "gated_deltanet", "model.delta.decay": False},  # its sums do not decay
    "rwkv4": {"model.family": "rwkv4"},
    "mega": {"model.family": "mega"},
    "conformer": {"model.family": "conformer"},
    "lite_transformer": {"model.family": "lite_transformer"},
    # Hybrids. One layer in four has softmax attention and a GLU, for exact recall.
    "flash_hybrid": {
        "model.family": "flash",
        "model.pattern": ("flash", "flash", "flash", "transformer_plus_plus"),
    },
    "gated_deltanet_hybrid": {
        "model.family": "gated_deltanet",
        "model.pattern": ("gated_deltanet", "gated_deltanet", "gated_deltanet", "transformer_plus_plus"),
    },
    # The sixth of twelve layers is FLASH-Quad's: all pairs of tokens meet once.
    "flash_quad_hybrid": {
        "model.family": "flash",
        "model.pattern": ("flash",) * 5 + ("flash_quad",) + ("flash",) * 6,
    },
    # Between layers with a sliding window of 64 tokens: the state stays constant.
    "based_hybrid": {"model.family": "based", "model.pattern": ("longformer", "based"), "model.window.size": 64},
    # The pattern of Reformer's paper: three layers with a sliding window for each LSH layer.
    "reformer_hybrid": {
        "model.family": "reformer",
        "model.pattern": ("longformer", "longformer", "longformer", "reformer"),
    },
}


# Those whose microbatch fits a GPU of 80 GB without computing anything again (docs/scaling.md).
WITHOUT_REMAT = {"flash", "transformer_plus_plus", "mamba2", "gated_deltanet", "gla"}


def get_config(name: str) -> ConfigDict:
    config = flash_base.get_config()
    config.model.remat = "none" if name in WITHOUT_REMAT else "products"
    config.update_from_flattened_dict(PRESETS[name])
    return config
