"""Linear maps with biases, for oracles that are written without them."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Affine:
    """A kernel in whose place x @ kernel is x W + b; its first dimension may be the layers, as that of an array."""

    kernel: np.ndarray
    bias: np.ndarray
    __array_ufunc__ = None  # so that an array leaves the product to __rmatmul__

    def __rmatmul__(self, x_LxD: np.ndarray) -> np.ndarray:
        """x W + b."""
        return x_LxD @ self.kernel + self.bias

    def __getitem__(self, n: int) -> "Affine":
        """That of layer n."""
        return Affine(self.kernel[n], self.bias[n])


def with_biases(params: dict) -> dict:
    """The parameters, with the biases of kernels inside of these."""
    if "kernel" in params and "bias" in params:
        return {"kernel": Affine(params["kernel"], params["bias"])}
    return {name: with_biases(x) if isinstance(x, dict) else x for name, x in params.items()}
