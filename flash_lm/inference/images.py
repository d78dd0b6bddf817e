"""Generates images pixel by pixel, or completes them from their first pixels."""

import numpy as np

from flash_lm.data.tokenizer import SPECIALS
from flash_lm.errors import InputError
from flash_lm.inference.engine import Engine
from flash_lm.inference.model import TrainedModel
from flash_lm.inference.sampling import Sampling, SamplingArrays


class ImageGenerator:
    """Generates images with a causal model trained on images."""

    def __init__(self, trained: TrainedModel, shape: tuple[int, ...]):
        """Compiles nothing before the first call.

        Args:
            trained: the model.
            shape: shape of an image: height, width, and perhaps channels.

        Raises:
            InputError: the model was trained on something else.
        """
        if trained.writes != "images":
            raise InputError(f"{trained.name} was not trained on images: train a model with configs/mnist.py")
        self._begin, self._shape = trained.tokenizer.begin, shape
        end, allowed_V = trained.tokenizer.end, trained.text_ids()  # an image ends after a fixed number of pixels
        self._engine = Engine(
            trained.decode_params, trained.mesh, end=end, allowed_V=allowed_V, **trained.engine_options
        )

    def draw(self, count: int, temperature: float = 1.0, seed: int = 0) -> np.ndarray:
        """Generates new images in one batch, count×shape, uint8."""
        return self.complete(np.zeros((count, 0), np.uint8), temperature, seed)

    def complete(self, known_NxP: np.ndarray, temperature: float = 1.0, seed: int = 0) -> np.ndarray:
        """Completes images from their first pixels.

        Args:
            known_NxP: uint8, the first P pixels of each.
            temperature: sampling temperature; 0: always the most likely value.
            seed: random seed.

        Returns:
            N×shape, uint8.
        """
        # A pixel is a word of the vocabulary, after the special tokens.
        count, known = known_NxP.shape
        missing = int(np.prod(self._shape)) - known
        prompts = [np.append(self._begin, row.astype(np.int32) + len(SPECIALS)).astype(np.int32) for row in known_NxP]
        carry = self._engine.prefill(prompts, missing)
        settings = SamplingArrays.from_sampling(Sampling(temperature=temperature))
        _, new = self._engine.advance(carry, settings, seed, missing)
        # Without the padding of the batch.
        values = (new.tokens_BxT[:count, :missing] - len(SPECIALS)).astype(np.uint8)
        return np.concatenate([known_NxP, values], axis=1).reshape(count, *self._shape)
