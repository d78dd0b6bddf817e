"""What the tests know of a sublayer and of a family; each file of `families` has rows."""

import dataclasses
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class Sublayer:
    """One sublayer.

    Attributes:
        oracle: (x_LxD, parameters, row, settings) -> y_LxD.
        parameters: settings -> how many, without short convolutions.
        flops: settings, length -> forward model FLOPs of one row, without short convolutions.
        convolved: settings -> how many channels have a filter, with short convolutions.
        owns_residual: whether it gets the residual stream and returns what replaces it.
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
    """One row. What most families have is the default.

    Attributes:
        sublayers: of a layer.
        absolute: the default of absolute_positions.
        rotary: the default of rotary.
        defaults: what its other open keys become: values, or functions of the settings.
        small: its own keys in the small model of the tests.

        letters: settings -> the letters of its formula in docs/families/, besides D, F, H, L and V.
        sizes: its own keys in the two sizes at which the formula is compared.
        tables: settings -> parameters of a layer in tables by position, which a longer model has more of.
        counted: whether XLA counts the same FLOPs.
        counted_at: keys at which it does.

        like: the family whose programs differ so little that `make test` compiles it in few tests only.
        both_ways: whether `make test` runs the bidirectional form, too.
        serves_prefix: whether tokens of a causal model may see the start of their document both ways.
        kernels: forms that have a Pallas kernel: causal, bidirectional.
        constant_state: whether decoding takes the same memory whatever the length.
        other_inputs: settings -> numbers that a layer's decode state holds besides a cache.
        rounded_state: what stands in the names of the decode state's arrays that `state_dtype` rounds.
        normalizes: whether a part without softmax needs `normalizer`.
        connects: the arguments of the first sublayer -> L×L of bool, whether it has a weight from t to u; None:
            wherever t sees u.
        everywhere: keys with which its derivatives are zero only where nothing is seen.
        ends: whether positions of its own end, whatever the absolute ones.
        forgets: whether its sums forget earlier tokens.
        one_chunk: keys with which a row of the tests is one chunk, if its chunks have their grid in the row.
        one_pass: whether its bidirectional form is another function where rows have one document.
        without_segments: whether that function is used without segment ids alone, too.
        grows: "linear": time and memory grow as the length does; "memory": memory does; None: not measured.
        memory: how many times as much memory twice the length may take.
        ill: forms in which the oracle itself moves by more than 1e-5 where inputs are 30 times as large.
        hashes: whether rounding may give a token another hash.
        recomputes: whether it recomputes products in the backward pass even without `remat`.
        repeats: whether its backward pass repeats products even with remat=products.
        recomputed: how near its gradients are with remat=products, relative.
        ends_with_norm: whether a layer ends with a norm, so that what it adds does not set the size of the stream.
        mesh: its own keys in the tests of meshes.
        by_pairs: whether its mixer takes pairs of queries and keys.
        starts_fixed: what stands in the names of parameters that nobody draws.
        ends_with_map: whether each sublayer ends with a map, which `residual_init` scales; else all but the first.
        normed_heads: whether a norm by head makes as much of a small q·k as of a large one.
    """

    sublayers: tuple[Sublayer, ...]
    absolute: str = "none"
    rotary: bool = False
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    small: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    letters: Callable[[SimpleNamespace], dict[str, int]] = lambda s: {}
    sizes: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
    tables: Callable[[SimpleNamespace], int] = lambda s: 0
    counted: bool = True
    counted_at: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    like: str = ""
    both_ways: bool = False
    serves_prefix: bool = False
    kernels: tuple[bool, ...] = ()
    constant_state: bool = False
    other_inputs: Callable[[SimpleNamespace], int] = lambda s: 0
    rounded_state: tuple[str, ...] = (".last", "['x']")
    normalizes: bool = False
    connects: Callable[..., np.ndarray] | None = None
    everywhere: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ends: bool = False
    forgets: bool = False
    one_chunk: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    one_pass: bool = False
    without_segments: bool = False
    grows: str | None = None
    memory: float = 2.2
    ill: tuple[str, ...] = ()
    hashes: bool = False
    recomputes: bool = False
    repeats: bool = False
    recomputed: float = 1e-5
    ends_with_norm: bool = False
    mesh: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    by_pairs: bool = True
    starts_fixed: tuple[str, ...] = ("variants", "shift", "core/log_rate", "core/bonus", "convolutions")
    ends_with_map: bool = True
    normed_heads: bool = False
