"""Model FLOPs in closed form: those that the equations need, whatever the program computes.

XLA's cost analysis counts a scanned layer once and recomputation twice, so it is of no use for utilisation.
"""

from flash_lm.models.language_model import LanguageModel

# Each of a product's two gradients is a product, too (PaLM, appendix B, counts in the same way).
FORWARD_AND_BACKWARD = 3


def training_flops(model: LanguageModel, tokens: int, length: int) -> float:
    """Model FLOPs of one training step, 2mnk a product, only visible pairs; without recomputation and the update.

    Args:
        model: the model; it may have shapes in place of arrays.
        tokens: tokens in the step.
        length: length of a row.
    """
    return FORWARD_AND_BACKWARD * tokens * model.flops_per_token(length)
