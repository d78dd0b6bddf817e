"""The rows of the table of families: the parts of a layer, and the defaults of open keys.

To add a family: write its mathematics in ops/, wrap it in layers/ with its own section of keys, and add its parts to
models/parts.py and its row here, or both in your own module with `flash_lm.register_family`. See docs/extend.md.
"""

from flash_lm.models.family import Family, register_family
from flash_lm.models.part import Default
from flash_lm.models.part_defaults import times
from flash_lm.models.parts import (
    AFT_CONV,
    AFT_FULL,
    AFT_LOCAL,
    AFT_SIMPLE,
    CHANNEL_MIX,
    CLOSING_HALF_STEP,
    CONVOLUTION_MODULE,
    COSINE,
    DELTA,
    FAVOR,
    FLOW,
    GAU_MIXED_CHUNK,
    GAU_QUADRATIC,
    GLA,
    GLU_PART,
    HALF_STEP,
    LINEAR,
    LOG_SPARSE,
    LONG_SHORT,
    LSH,
    MEGA,
    MLP_PART,
    NYSTROM,
    RETENTION,
    SEGMENTS,
    SLOTS,
    SOFTMAX,
    SOFTMAX_MIXED_CHUNK,
    SPAN,
    SSD,
    TAYLOR,
    TIME_MIX,
    WINDOW,
)

_LEARNED: dict[str, Default] = {"absolute_positions": "learned"}
_ROTARY: dict[str, Default] = {"rotary": True}
_UNITS: dict[str, Default] = _ROTARY | {
    "absolute_positions": "scaled_sinusoid",
    "norm": lambda config: "layer" if config.causal else "scale",
}
_TOEPLITZ_REACH = 512  # from the paper: a learned w up to here, rope(a)·rope(b)ᵀ above
_BY_LENGTH = {"gau.relative_bias": lambda config: "toeplitz" if config.max_length <= _TOEPLITZ_REACH else "rope"}

_VASWANI = "Vaswani et al. 2017, arXiv:1706.03762"
_FLASH = "Hua et al. 2022, arXiv:2202.10447"
_AFT = "Zhai et al. 2021, arXiv:2105.14103"

register_family(
    "transformer",
    Family((SOFTMAX, MLP_PART), _LEARNED, about="softmax attention and an MLP, learned positions", paper=_VASWANI),
)
register_family(
    "transformer_plus",
    Family(
        (SOFTMAX, MLP_PART),
        _ROTARY,
        about="the Transformer with rotary positions",
        paper="Su et al. 2021, arXiv:2104.09864",
    ),
)
register_family(
    "transformer_plus_plus",
    Family(
        (SOFTMAX, GLU_PART),
        _ROTARY,
        about="softmax attention and a gated feed-forward (GLU), rotary positions",
        paper="Shazeer 2020, arXiv:2002.05202",
    ),
)
register_family(
    "flash_quad",
    Family(
        (GAU_QUADRATIC, GAU_QUADRATIC),
        _UNITS | _BY_LENGTH | {"divides": "weights"},  # by the rule of configs/studies/divisor.py
        about="two gated attention units over all pairs of tokens",
        paper=_FLASH,
    ),
)
register_family(
    "flash",
    Family(
        (GAU_MIXED_CHUNK, GAU_MIXED_CHUNK),
        _UNITS | {"gau.relative_bias": "toeplitz"},
        about="two gated attention units: quadratic inside a chunk, linear over chunks",
        paper=_FLASH,
    ),
)
register_family(
    "mc_tfm",
    Family(
        (SOFTMAX_MIXED_CHUNK, GLU_PART),
        _ROTARY,
        about="Transformer++ with mixed chunk attention: softmax inside a chunk, linear over chunks",
        paper=_FLASH,
    ),
)
register_family(
    "aft_full",
    Family((AFT_FULL, MLP_PART), _LEARNED, about="attention-free: a learned bias per pair of positions", paper=_AFT),
)
register_family(
    "aft_local",
    Family((AFT_LOCAL, MLP_PART), _LEARNED, about="AFT-full with its bias only inside a window", paper=_AFT),
)
register_family("aft_simple", Family((AFT_SIMPLE, MLP_PART), _LEARNED, about="AFT without a position bias", paper=_AFT))
# One key a head instead of one a channel saves D² parameters, which the MLP gets, so num_layers means the same size.
register_family(
    "aft_conv",
    Family(
        (AFT_CONV, MLP_PART),
        _LEARNED | {"mlp_dim": times(9, 2)},
        about="AFT with a bias by distance: one convolution per head",
        paper=_AFT,
    ),
)
register_family(
    "linear_transformer",
    Family(
        (LINEAR, MLP_PART),
        _LEARNED,
        about="linear attention with the features elu + 1, and an MLP",
        paper="Katharopoulos et al. 2020, arXiv:2006.16236",
    ),
)
register_family(
    "performer",
    Family(
        (FAVOR, MLP_PART),
        _LEARNED,
        about="softmax estimated by positive random features (FAVOR+), and an MLP",
        paper="Choromanski et al. 2020, arXiv:2009.14794",
    ),
)
register_family(
    "longformer",
    Family(
        (WINDOW, MLP_PART),
        _ROTARY,
        about="softmax attention to a sliding window, and an MLP; windows may grow with depth and have gaps",
        paper="Beltagy et al. 2020, arXiv:2004.05150",
    ),
)
# As in AFT-conv, the MLP gets the D² parameters that shared queries and keys save.
register_family(
    "reformer",
    Family(
        (LSH, MLP_PART),
        _LEARNED | {"mlp_dim": times(9, 2)},
        about="softmax attention to tokens with the same hash, queries that are keys as well, and an MLP",
        paper="Kitaev et al. 2020, arXiv:2001.04451",
    ),
)
register_family(
    "adaptive_span",
    Family(
        (SPAN, MLP_PART),
        _ROTARY,
        about="softmax attention whose heads learn how far back they look, and an MLP",
        paper="Sukhbaatar et al. 2019, arXiv:1905.07799",
    ),
)
register_family(
    "log_sparse",
    Family(
        (LOG_SPARSE, MLP_PART),
        _LEARNED,
        about="softmax attention to near tokens and to some at distances that double, queries and keys by "
        "convolutions, and an MLP",
        paper="Li et al. 2019, arXiv:1907.00235",
    ),
)
register_family(
    "cosformer",
    Family(
        (COSINE, MLP_PART),
        _LEARNED,
        about="linear attention with the features relu, weighted by the cosine of the distance, and an MLP",
        paper="Qin et al. 2022, arXiv:2202.08791",
    ),
)
register_family(
    "flowformer",
    Family(
        (FLOW, MLP_PART),
        _LEARNED,
        about="linear attention between conserved flows of sources and sinks, and an MLP",
        paper="Wu et al. 2022, arXiv:2202.06258",
    ),
)
register_family(
    "linformer",
    Family(
        (SLOTS, MLP_PART),
        _LEARNED,
        about="softmax attention to slots that mix all tokens, and an MLP; bidirectional, one document a row",
        paper="Wang et al. 2020, arXiv:2006.04768",
    ),
)
register_family(
    "nystromformer",
    Family(
        (NYSTROM, MLP_PART),
        _LEARNED,
        about="softmax attention estimated from means of tokens, and an MLP; bidirectional, one document a row",
        paper="Xiong et al. 2021, arXiv:2102.03902",
    ),
)
# The map of distances is a fifth matrix of D² parameters, which the MLP gives.
register_family(
    "transformer_xl",
    Family(
        (SEGMENTS, MLP_PART),
        {"mlp_dim": times(7, 2)},
        about="softmax attention to the own segment and the one before, relative positions, and an MLP",
        paper="Dai et al. 2019, arXiv:1901.02860",
    ),
)
# Values and gates of 2 D take 4 D² more than the Transformer's, which the MLP gives.
register_family(
    "retnet",
    Family(
        (RETENTION, MLP_PART),
        _ROTARY | {"mlp_dim": times(2)},
        about="linear attention whose sums forget at a rate a head, gated values twice as wide, and an MLP",
        paper="Sun et al. 2023, arXiv:2307.08621",
    ),
)
register_family(
    "mamba2",
    Family(
        (SSD, SSD),
        about="two state space units: linear attention whose sums forget as the tokens say, gated, convolutions",
        paper="Dao and Gu 2024, arXiv:2405.21060",
    ),
)
# 6 D² and a GLU of 6 D², instead of 4 D² and 8 D².
register_family(
    "gated_deltanet",
    Family(
        (DELTA, GLU_PART),
        {"mlp_dim": times(2)},
        about="a sum in which each token replaces what its key reads, and which forgets as the tokens say, and a GLU",
        paper="Yang et al. 2024, arXiv:2412.06464",
    ),
)
register_family(
    "gla",
    Family(
        (GLA, GLU_PART),
        about="linear attention whose sums forget as the tokens say, each channel for itself, gated, and a GLU",
        paper="Yang et al. 2023, arXiv:2312.06635",
    ),
)
# Narrow queries and keys of 16 a head leave 1.5 D² of attention's 4 D² to the GLU, where a head is 64 wide.
register_family(
    "based",
    Family(
        (TAYLOR, GLU_PART),
        _LEARNED | {"mlp_dim": times(19, 6)},
        about="linear attention with the features of 1 + s + s²/2, narrow queries and keys, and a GLU",
        paper="Arora et al. 2024, arXiv:2402.18668",
    ),
)
# Values of 2 D and a gated residual take 8.25 D², which leaves the MLP a width of 2 D, as published.
register_family(
    "mega",
    Family(
        (MEGA, MLP_PART),
        {"mlp_dim": times(2)},
        about="softmax attention inside chunks, whose queries and keys read moving averages, a gated residual, and an "
        "MLP",
        paper="Ma et al. 2022, arXiv:2209.10655",
    ),
)
register_family(
    "rwkv4",
    Family(
        (TIME_MIX, CHANNEL_MIX),
        about="a mean of values whose weights decay by channel, and a gated MLP; both read the token before, too",
        paper="Peng et al. 2023, arXiv:2305.13048",
    ),
)
# Two feed-forwards of 1.25 D, which with 3 D² of the convolution module have the 8 D² of the Transformer's.
register_family(
    "conformer",
    Family(
        (HALF_STEP, SOFTMAX, CONVOLUTION_MODULE, CLOSING_HALF_STEP),
        _ROTARY,
        about="softmax attention and a convolution by channel, between two feed-forwards with half of the residual",
        paper="Gulati et al. 2020, arXiv:2005.08100",
        mixer=1,
    ),
)
# Half of the channels attend and half convolve, which takes 1.75 D² and leaves the MLP more than 8 D².
register_family(
    "lite_transformer",
    Family(
        (LONG_SHORT, MLP_PART),
        _LEARNED | {"mlp_dim": times(41, 8)},
        about="softmax attention in half of the heads and convolutions whose taps differ by token in the others, and "
        "an MLP",
        paper="Wu et al. 2020, arXiv:2004.11886",
    ),
)
