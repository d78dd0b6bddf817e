"""Short convolutions, tap by tap: y_t = Σ_i taps_i x_(t + i − before) over the tokens of t's document."""

import numpy as np

from oracles.norms import normalise


def convolve(x_LxD: np.ndarray, taps: np.ndarray, sees, causal: bool) -> np.ndarray:
    """Convolves with `taps`, W×D (one filter per channel) or W×D×E.

    The token itself is at the last tap if causal, else at the middle one.
    """
    center = len(taps) - 1 if causal else len(taps) // 2
    out = np.zeros((len(x_LxD), taps.shape[-1]))
    for t in range(len(x_LxD)):
        for i, tap in enumerate(taps):
            u = t + i - center
            if 0 <= u < len(x_LxD) and sees(t, u):
                out[t] += x_LxD[u] * tap if tap.ndim == 1 else x_LxD[u] @ tap
    return out


def project(x_LxD: np.ndarray, p: dict, name: str, row, settings) -> np.ndarray:
    """Computes x W for this name; convolves, activates and normalises it if the parameters and settings say so."""
    return normalise_heads(_project_and_convolve(x_LxD, p, name, row, settings), p, name, settings)


def normalise_heads(y_LxM: np.ndarray, p: dict, name: str, settings) -> np.ndarray:
    """Applies the RMS norm of this name to each head's vector, if the parameters have its gain."""
    if f"{name}_norm" not in p:
        return y_LxM
    gain = p[f"{name}_norm"]
    vectors = y_LxM.reshape(-1, len(gain["scale"]))
    return normalise("rms", vectors, gain, settings.norm_epsilon).reshape(y_LxM.shape)


def _project_and_convolve(x_LxD: np.ndarray, p: dict, name: str, row, settings) -> np.ndarray:
    y_LxM = x_LxD @ p[name]["kernel"]
    if name not in p.get("convolutions", {}):
        return y_LxM
    y_LxM = convolve(y_LxM, p["convolutions"][name], row.sees, settings.causal)
    activated = settings.convolution.activation == "silu" and "shared" not in p  # gated units activate maps themselves
    return y_LxM / (1 + np.exp(-y_LxM)) if activated else y_LxM
