"""The speed of decoding and the size of the state behind it, at a context that is only counted."""

import statistics

import numpy as np

from flash_lm.inference.engine import Engine
from flash_lm.inference.model import TrainedModel
from flash_lm.runs.jsonl import Line
from flash_lm.timing.bare_decoding import make_decode_turn

_TOKENS = 16  # of a turn, at least
_WARM_UP = 2  # turns: one compiles, one touches the memory


def measure_speed(model: TrainedModel, context: int, rows: int, turns: int) -> Line:
    """One line: tokens a second of greedy decoding at the end of a context, and the bytes of the state.

    The state is that of an empty text with its counter set, since its values do not change the work. A turn is at
    least as long as the time between two flushes of the state, so that these are counted.
    """
    allowed_V, end = model.text_ids(), model.tokenizer.end
    allowed_V[end] = False  # no row ends
    engine = Engine(model.decode_params, model.mesh, end=end, allowed_V=allowed_V, **model.engine_options)
    tokens = max(_TOKENS, *model.model.abstract.flush_every, 0)
    turn = make_decode_turn(engine, rows, context, tokens)
    times_ms = [turn() for _ in range(_WARM_UP + turns)][_WARM_UP:]
    ms = statistics.median(times_ms) / tokens
    return {
        "context": context,
        "rows": rows,
        "tokens_per_turn": tokens,
        "turns": turns,
        "ms_per_step": ms,
        "tokens_per_second": 1000 * rows / ms,
        "spread": float(np.ptp(times_ms)) / statistics.median(times_ms),
        "state_bytes": engine.state_bytes(rows, context),
    }
