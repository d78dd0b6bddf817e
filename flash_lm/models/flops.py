"""Model FLOPs in closed form: those that the equations need, whatever the program does.

XLA's cost analysis counts a scanned layer once and recomputation twice, so no utilisation can be told from it.
"""

from flash_lm.models.language_model import LanguageModel

# A product's gradients by its two operands are a product each (PaLM, appendix B, counts in the same way).
_FORWARD_AND_BACKWARD = 3


def training_flops(model: LanguageModel, tokens: int, length: int) -> float:
    """Model FLOPs of one training step, 2mnk a product, of visible pairs alone; without recomputation and the update.

    Args:
        model: may have shapes in place of arrays.
        tokens: of the step.
        length: of its rows.
    """
    return _FORWARD_AND_BACKWARD * tokens * model.flops_per_token(length)
