"""Entries of the tests' table: a sublayer and a family; each file in `families` defines some in `ROWS`."""

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Sublayer:
    """Reference and closed forms of one sublayer.

    Attributes:
        oracle: (x_LxD, parameters, row, settings) -> y_LxD.
        parameters: settings -> number of parameters, without short convolutions.
        flops: settings, length -> forward model FLOPs of one sequence, without short convolutions.
        convolved: settings -> number of channels with a filter, if short convolutions are on.
        owns_residual: whether it takes the residual stream and returns its replacement.
    """

    oracle: Callable[..., np.ndarray]
    parameters: Callable[[SimpleNamespace], int]
    flops: Callable[[SimpleNamespace, int], float]
    convolved: Callable[[SimpleNamespace], int] = lambda s: 0
    owns_residual: bool = False

    def __call__(self, *arguments) -> np.ndarray:
        """The oracle's output."""
        return self.oracle(*arguments)


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """How one family differs from most in the tests; the defaults are what most families have.

    Attributes:
        sublayers: sublayers of a layer.
        absolute: default of absolute_positions.
        rotary: default of rotary.
        defaults: defaults of its other open keys: values, or functions of the settings.
        small: its keys in the small model of the tests.

        letters: settings -> letters of its formula in docs/families/, besides D, F, H, L and V.
        sizes: its keys in the two sizes at which the formula is compared.
        tables: settings -> parameters of a layer that grow with max_length.
        xla_counts_flops: whether the FLOPs agree with those that XLA counts.
        xla_keys: keys at which they agree.

        like: a family with nearly the same programs; if set, `make test` compiles this one in few tests only.
        both_ways: whether `make test` also runs the bidirectional form.
        serves_prefix: whether a causal model supports a bidirectional prefix of each document.
        kernels: values of `causal` for which it has a Pallas kernel.
        constant_state: whether the decode state has the same size at any length.
        other_inputs: settings -> numbers in a layer's decode state besides the cache.
        rounded_state: substrings of the names of the decode state's arrays that `state_dtype` rounds.
        reads_normalizer: whether it has a part without softmax that reads `normalizer`.
        connects: the arguments of the first sublayer -> L×L mask, whether it has a weight from t to u; None: wherever
            t sees u.
        smooth_keys: keys with which its derivatives are zero only for pairs that are not visible.
        limits_length: whether the family limits the length itself, whatever the absolute positions.
        decays: whether its sums decay.
        one_chunk: keys with which a sequence of the tests is one chunk, if chunk borders are fixed in the sequence.
        one_pass: whether its bidirectional form uses another function for one document per sequence.
        without_segments: whether that function is also used without segment ids.
        growth: "linear": time and memory are linear in the length; "memory": memory is; None: not measured.
        memory: bound on the ratio of memory at twice the length.
        ill_conditioned: forms in which rounding of inputs 30 times as large moves the oracle by more than 1e-5.
        hashes_tokens: whether it hashes tokens, so that rounding may change a hash.
        recomputes_products: whether the backward pass recomputes products even without `remat`.
        repeats_products: whether the backward pass recomputes products even with remat=products.
        remat_rtol: relative tolerance of its gradients with remat=products.
        ends_with_norm: whether a layer ends with a norm, which fixes the scale of the residual stream.
        mesh: its keys in the tests of meshes.
        by_pairs: whether its mixer takes queries and keys.
        fixed_init: substrings of the names of parameters whose initial values are not random.
        ends_with_map: whether every sublayer ends with a linear map, which `residual_init` scales; else all except the
            first.
        normed_heads: whether a norm per head removes the scale of q·k.
    """

    sublayers: tuple[Sublayer, ...]
    absolute: str = "none"
    rotary: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    small: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    letters: Callable[[SimpleNamespace], dict[str, int]] = lambda s: {}
    sizes: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
    tables: Callable[[SimpleNamespace], int] = lambda s: 0
    xla_counts_flops: bool = True
    xla_keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    like: str = ""
    both_ways: bool = False
    serves_prefix: bool = False
    kernels: tuple[bool, ...] = ()
    constant_state: bool = False
    other_inputs: Callable[[SimpleNamespace], int] = lambda s: 0
    rounded_state: tuple[str, ...] = (".last", "['x']")
    reads_normalizer: bool = False
    connects: Callable[..., np.ndarray] | None = None
    smooth_keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limits_length: bool = False
    decays: bool = False
    one_chunk: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    one_pass: bool = False
    without_segments: bool = False
    growth: str | None = None
    memory: float = 2.2
    ill_conditioned: tuple[str, ...] = ()
    hashes_tokens: bool = False
    recomputes_products: bool = False
    repeats_products: bool = False
    remat_rtol: float = 1e-5
    ends_with_norm: bool = False
    mesh: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    by_pairs: bool = True
    fixed_init: tuple[str, ...] = ("variants", "shift", "core/log_rate", "core/bonus", "convolutions")
    ends_with_map: bool = True
    normed_heads: bool = False
