"""Choice of the implementation of softmax attention: it depends on the request, the machine and what is computed."""

import jax

from flash_lm.errors import InputError
from flash_lm.ops import fused_attention
from flash_lm.ops.fused_attention import LIBRARIES
from flash_lm.ops.implementations import report
from flash_lm.ops.target import target_platform
from flash_lm.ops.visibility import KeySpan, MaskStructure

IMPLEMENTATIONS = ("auto", "plain", "blocked", *LIBRARIES)
PART = "softmax attention"
_FASTEST = {"gpu": "cudnn", "tpu": "splash"}  # by platform; elsewhere blocked


def choose_softmax(
    requested: str,
    q_BxHxLxK: jax.Array,
    k_BxHxMxK: jax.Array,
    v_BxHxMxE: jax.Array,
    key_span: KeySpan,
    structure: MaskStructure | None,
    *,
    part: str = PART,
    otherwise: str = "blocked",
    trains: bool = True,
) -> str:
    """The implementation of one attention; it is reported.

    Args:
        requested: `model.quadratic.implementation`, one of `IMPLEMENTATIONS`; `auto` is the library of the machine.
        q_BxHxLxK: queries, for their shape and dtype, as are the keys and values.
        k_BxHxMxK: keys.
        v_BxHxMxE: values.
        key_span: keys that each query sees.
        structure: the same in terms of the sequence; None: it has none.
        part: name of the part of the model.
        otherwise: name of the form that XLA compiles here.
        trains: whether this is a training form: its derivative is needed, and a requested implementation that does not
            work is an error. In decoding, `otherwise` is chosen then.

    Returns:
        A name of `LIBRARIES`, or `otherwise`.

    Raises:
        InputError: the requested implementation cannot compute this.
    """
    name = _FASTEST.get(target_platform(), "blocked") if requested == "auto" else requested
    if name not in LIBRARIES:
        asked = "" if requested == "auto" else ", as model.quadratic.implementation says"
        report(part, otherwise + asked)
        return otherwise
    shapes = (q_BxHxLxK, k_BxHxMxK, v_BxHxMxE)
    if reason := fused_attention.problem(name, *shapes, key_span, structure, trains=trains):
        if trains and requested != "auto":
            raise _refusal(name, reason)
        report(part, f"{otherwise}, not {name}: {reason}")
        return otherwise
    # What packing costs is said; the mask of a prompt's piece and its cache is small.
    size = structure and fused_attention.mask_bytes(name, q_BxHxLxK, k_BxHxMxK, structure)
    report(part, f"{name}, with a mask of all pairs, {size / 1e6:,.1f} MB" if size else name)
    return name


def softmax_by_library(
    requested: str,
    q_BxHxLxK: jax.Array,
    k_BxHxMxK: jax.Array,
    v_BxHxMxE: jax.Array,
    key_span: KeySpan,
    structure: MaskStructure | None,
    *,
    scale: float,
    part: str = PART,
    otherwise: str = "blocked",
    trains: bool = True,
) -> jax.Array | None:
    """`fused_attention` by the library that `choose_softmax` chooses; None: XLA compiles it. Arguments are theirs."""
    arrays = (q_BxHxLxK, k_BxHxMxK, v_BxHxMxE)
    name = choose_softmax(requested, *arrays, key_span, structure, part=part, otherwise=otherwise, trains=trains)
    if name not in LIBRARIES:
        return None
    return fused_attention.fused_attention(name, *arrays, key_span, structure, scale=scale)


def check_request(requested: str, function: str, has_bias: bool) -> None:
    """Checks what is known before shapes are: when the model is built, not in its first step.

    Raises:
        InputError: the requested implementation does not exist here, or not for this attention.
    """
    if requested not in LIBRARIES:
        return
    reason = fused_attention.unavailable(requested)
    if function != "softmax" or has_bias:
        reason = f"it is for softmax without a bias, and this is {function}{' with a bias' if has_bias else ''}"
    if reason:
        raise _refusal(requested, reason)


def _refusal(name: str, reason: str) -> InputError:
    return InputError(
        f"model.quadratic.implementation={name} cannot compute this: {reason}; set "
        "--config.model.quadratic.implementation=auto"
    )
