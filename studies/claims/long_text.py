"""Shows whether a run's generated text degrades far beyond the length of its training.

    python -m studies.claims.long_text runs/flash/rows_of_512/flash_count_seed_* --tokens=8192 \
        --out=studies/claims/results/long_text.jsonl

Texts are drawn at temperature 1 from nothing but begin-of-text, and are not allowed to end. Of windows as long as the
rows of training: the mean −log p of the drawn tokens (nats), which for a model that stays itself stays level, and the
share of different ones among all runs of four tokens, which falls where a text repeats itself.
"""

import argparse
import pathlib

import jax
import numpy as np

from flash_lm.cli.flags import add_plugins_flag, use_plugins
from flash_lm.cli.run import run
from flash_lm.cli.types import positive
from flash_lm.errors import InputError
from flash_lm.inference.engine import Engine
from flash_lm.inference.model import TrainedModel, load_model
from flash_lm.inference.sampling import Sampling, SamplingArrays
from flash_lm.runs.jsonl import Line, append_jsonl
from flash_lm.runs.provenance import provenance

_GRAM = 4  # tokens


def windows(tokens_BxT: np.ndarray, log_probs_BxT: np.ndarray, size: int) -> list[Line]:
    """One line per window of `size` tokens: its start, mean −log p, and the share of distinct token n-grams."""
    lines = []
    for start in range(0, tokens_BxT.shape[1] - size + 1, size):
        here = tokens_BxT[:, start : start + size]
        grams = [np.lib.stride_tricks.sliding_window_view(row, _GRAM) for row in here]
        distinct = np.mean([len(np.unique(x, axis=0)) / len(x) for x in grams])
        nll = -float(log_probs_BxT[:, start : start + size].mean())
        lines.append({"start": start, "nll": nll, "distinct": float(distinct)})
    return lines


def draw(trained: TrainedModel, tokens: int, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Generates tokens; returns them and their log-probabilities, samples × tokens."""
    allowed_V = trained.text_ids()  # without end-of-text
    engine = Engine(trained.decode_params, trained.mesh, end=trained.tokenizer.end, allowed_V=allowed_V)
    carry = engine.prefill([np.array([trained.tokenizer.begin], np.int32)] * samples, tokens)
    _, new = engine.advance(carry, SamplingArrays.from_sampling(Sampling()), seed, tokens)
    assert (new.lengths_B[:samples] == tokens).all()
    return np.asarray(new.tokens_BxT[:samples, :tokens]), np.asarray(new.log_probs_BxT[:samples, :tokens])


def main(argv: list[str]) -> None:
    """Appends one line per run and window to OUT, and prints the first and the last."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("workdirs", nargs="+", metavar="RUN[@best|@STEP]", help="folders of runs")
    parser.add_argument("--tokens", type=positive, default=8192)
    parser.add_argument("--samples", type=positive, default=4, help="texts per run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True, type=pathlib.Path)
    add_plugins_flag(parser)
    arguments = parser.parse_args(argv)
    use_plugins(arguments)
    for workdir in arguments.workdirs:
        trained = load_model(workdir)
        if not trained.task.answers.continues:
            raise InputError(f"{workdir} cannot generate text: give runs of task=causal_lm")
        size = trained.config.data.length
        if arguments.tokens < size:
            raise InputError(
                f"--tokens={arguments.tokens} must be at least {size}, the row length of training: raise it"
            )
        found = windows(*draw(trained, arguments.tokens, arguments.samples, arguments.seed), size)
        about = {"run": trained.name, "samples": arguments.samples, "seed": arguments.seed, "length": size}
        append_jsonl(arguments.out, [about | line | provenance(jax.devices()[0].device_kind) for line in found])
        first, last = found[0], found[-1]
        print(
            f"{trained.name}: −log p {first['nll']:.3f} in tokens 0 to {size}, {last['nll']:.3f} from {last['start']} "
            f"on; different runs of four {first['distinct']:.1%} and {last['distinct']:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    run(main)
