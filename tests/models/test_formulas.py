"""The formula for the parameters of a layer on each family's page, against the count of a model of two sizes."""

import re

import pytest
from small import ROOT

from flash_lm.families.family import FAMILIES
from models.cases import FORM, model_config
from models.test_sizes import count

# Two sizes that share no number, both longer than the 512 tokens above which FLASH-Quad has another bias.
SIZES = [
    {"model_dim": 32, "num_heads": 2, "gau.shared_dim": 8, "chunks.size": 16, "max_length": 520, "vocab_size": 61},
    {"model_dim": 48, "num_heads": 3, "gau.shared_dim": 10, "chunks.size": 12, "max_length": 600, "vocab_size": 99},
]
OF_SECTIONS = [
    {"aft.window": 5, "aft.bias_dim": 6, "linformer.slots": 3, "nystrom.kernel_size": 9, "ssd.state_dim": 12},
    {"aft.window": 7, "aft.bias_dim": 4, "linformer.slots": 11, "nystrom.kernel_size": 2, "ssd.state_dim": 20},
]
OF_SECTIONS[0] |= {"conformer.kernel": 9, "lite.kernels": (7, 3)}
OF_SECTIONS[1] |= {"conformer.kernel": 4, "lite.kernels": (5, 8, 12)}  # two layers, so not the last


def value(formula: str, letters: dict[str, int]) -> int:
    """Of a product or sum as mathematics writes it, such as 4D^2 + 2(D + 1)."""
    signs = re.findall(r"\d+|[A-Z]|[-+^()]", formula)
    assert "".join(signs) == formula.replace(" ", "")
    python = ""
    for before, sign in zip(["+", *signs], signs, strict=False):
        times = before not in "-+^(" and sign not in "-+^)"
        python += ("*" if times else "") + {"^": "**"}.get(sign, str(letters.get(sign, sign)))
    return eval(python)


def test_a_formula_is_read_as_mathematics():
    assert value("2(3DE + D^2 - 1)F", {"D": 5, "E": 7, "F": 2}) == 2 * (105 + 25 - 1) * 2


@pytest.mark.parametrize("size", range(len(SIZES)))
@pytest.mark.parametrize("family", FAMILIES)
def test_the_formula_of_a_page_counts_the_parameters(family, size):
    page = (ROOT / "docs" / "families" / f"{family}.md").read_text()
    (formula,) = re.findall(rf"^```\{{family\}} {family}\n(.+)\n```$", page, re.MULTILINE)
    config = model_config(family, FORM[family], tie_embeddings=True, num_layers=2, **SIZES[size] | OF_SECTIONS[size])
    keys = {"D": "model_dim", "H": "num_heads", "L": "max_length", "V": "vocab_size"}
    letters = {letter: config[key] for letter, key in keys.items()}
    letters |= {"S": config.gau.shared_dim, "C": config.chunks.size, "W": config.aft.window, "R": config.aft.bias_dim}
    letters |= {"U": 3 * config.model_dim // 4, "T": 3 * config.model_dim // 2, "Q": config.model_dim // 2}
    letters["B"] = letters["T"] // config.num_heads
    letters["Y"] = config.model_dim // config.num_heads
    letters |= {"N": config.ssd.state_dim, "G": 2 * config.model_dim // (config.ssd.head_width or 64)}
    letters |= {"Z": config.model_dim // 8 * 2, "I": config.mega.ema_dim}
    letters["A"] = config.based.feature_dim
    letters["X"] = config.conformer.kernel if family == "conformer" else max(config.lite.kernels[:2])
    convolving = config.num_heads // 2  # half of the heads, of an odd number one less
    letters |= {"O": convolving, "J": config.model_dim - convolving * letters["Y"]}
    letters |= {"M": config.linformer.slots, "P": config.nystrom.kernel_size}
    width = letters["D"]
    mlp = {"transformer_plus_plus": 8 * width / 3, "mc_tfm": 8 * width / 3, "aft_conv": 9 * width / 2}
    mlp |= {"reformer": mlp["aft_conv"], "retnet": 2 * width, "gated_deltanet": 2 * width}
    mlp["transformer_xl"] = 7 * width / 2
    mlp |= {"gla": 8 * width / 3, "based": 19 * width / 6, "rwkv4": 7 * width / 2, "mega": 2 * width}
    mlp |= {"conformer": 5 * width / 4, "lite_transformer": 41 * width / 8}
    letters |= {"E": 2 * width, "F": -int(-mlp.get(family, 4 * width) // 8) * 8}
    positions = {"transformer_plus": "0", "transformer_plus_plus": "0", "mc_tfm": "0", "flash": "1", "flash_quad": "1"}
    positions |= {"longformer": "0", "adaptive_span": "0", "transformer_xl": "0"}
    positions |= dict.fromkeys(("retnet", "mamba2", "gated_deltanet", "gla", "rwkv4", "mega", "conformer"), "0")
    whole = f"VD + 2D + {positions.get(family, 'LD')} + 2({formula})"
    assert count(config) == value(whole, letters)
