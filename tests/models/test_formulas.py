"""The formula for a layer's parameters on each family's page, against the count of two models."""

import re

import pytest
from oracles import families as oracle_families
from small import ROOT

from flash_lm.families.family import FAMILIES
from models.cases import FORM, model_config
from models.test_sizes import count

# Two sizes that share no number, both longer than the 512 tokens above which FLASH-Quad has another bias.
SIZES = [
    {"model_dim": 32, "num_heads": 2, "max_length": 520, "vocab_size": 61},
    {"model_dim": 48, "num_heads": 3, "max_length": 600, "vocab_size": 99},
]


def value(formula: str, letters: dict[str, int]) -> int:
    """Evaluates a formula in mathematical notation, such as 4D^2 + 2(D + 1)."""
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
    row = oracle_families.FAMILIES[family]
    keys = SIZES[size] | dict(row.sizes[size])
    config = model_config(family, FORM[family], tie_embeddings=True, num_layers=2, **keys)
    settings = oracle_families.complete(config.to_dict())
    letters = {"D": settings.model_dim, "H": settings.num_heads, "L": settings.max_length, "V": settings.vocab_size}
    letters |= {"F": settings.mlp_dim} | row.letters(settings)
    positions = {"none": "0", "learned": "LD", "scaled_sinusoid": "1"}[settings.absolute_positions]
    full_formula = f"VD + 2D + {positions} + 2({formula})"
    assert count(config) == value(full_formula, letters)
