"""The Linear Transformer: φ = elu + 1 (Katharopoulos et al. 2020, eq. 7)."""

from types import SimpleNamespace

import numpy as np
from oracles import counting
from oracles.attention import Row
from oracles.feed_forward import MLP
from oracles.linear import attend_by_logs, elu_plus_one
from oracles.row import Family, Sublayer


def linear_attention(x_LxD: np.ndarray, p: dict, row: Row, settings) -> np.ndarray:
    """Concat(head_h) W_o with φ = elu + 1."""
    logs = lambda x: np.log(elu_plus_one(x))
    return attend_by_logs(x_LxD, p, row, settings, logs)


def _flops(s: SimpleNamespace, length: int) -> int:
    """The denominator counts as one more value."""
    width = s.model_dim // s.num_heads
    return 2 * length * 4 * s.model_dim**2 + 2 * s.num_heads * counting.linear_sums(s, length, width, width + 1)


LINEAR = Sublayer(linear_attention, lambda s: 4 * s.model_dim**2, _flops, lambda s: 3 * s.model_dim)
ROWS = {
    "linear_transformer": Family(
        (LINEAR, MLP),
        absolute="learned",
        small={"linear.chunk_size": 8},
        serves_prefix=True,
        kernels=(True,),  # the bidirectional form is two products
        constant_state=True,
        one_pass=True,
        growth="linear",
    )
}
