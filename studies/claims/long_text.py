"""Measures whether a run's generated text degrades far beyond the training length.

    python -m studies.claims.long_text runs/flash/rows_of_512/flash_count_seed_* --tokens=8192 \
        --out=studies/claims/results/long_text.jsonl

Texts are sampled at temperature 1 from begin-of-text, and end-of-text is not allowed. For each window of the training
length it reports the mean −log p of the sampled tokens (nats), which stays level if the model does not degrade, and the
share of distinct 4-grams, which falls where a text repeats itself.
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


def window_statistics(tokens_BxT: np.ndarray, log_probs_BxT: np.ndarray, size: int) -> list[Line]:
    """Returns one line per window of `size` tokens: its start, mean −log p, and the share of distinct 4-grams."""
    lines = []
    for start in range(0, tokens_BxT.shape[1] - size + 1, size):
        window = tokens_BxT[:, start : start + size]
        grams = [np.lib.stride_tricks.sliding_window_view(row, _GRAM) for row in window]
        distinct = np.mean([len(np.unique(x, axis=0)) / len(x) for x in grams])
        nll = -float(log_probs_BxT[:, start : start + size].mean())
        lines.append({"start": start, "nll": nll, "distinct": float(distinct)})
    return lines


def draw(trained: TrainedModel, tokens: int, samples: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Samples texts; returns tokens and their log-probabilities, samples × tokens."""
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
        # Check that the run can generate texts longer than its training.
        trained = load_model(workdir)
        if not trained.task.answers.continues:
            raise InputError(f"{workdir} cannot generate text: give runs of task=causal_lm")
        size = trained.config.data.length
        if arguments.tokens < size:
            raise InputError(
                f"--tokens={arguments.tokens} must be at least {size}, the row length of training: raise it"
            )
        # Sample texts, and append a line per window.
        statistics = window_statistics(*draw(trained, arguments.tokens, arguments.samples, arguments.seed), size)
        about = {"run": trained.name, "samples": arguments.samples, "seed": arguments.seed, "length": size}
        append_jsonl(arguments.out, [about | line | provenance(jax.devices()[0].device_kind) for line in statistics])
        first, last = statistics[0], statistics[-1]
        print(
            f"{trained.name}: −log p {first['nll']:.3f} in tokens 0 to {size}, {last['nll']:.3f} from {last['start']} "
            f"on; different runs of four {first['distinct']:.1%} and {last['distinct']:.1%}",
            flush=True,
        )


if __name__ == "__main__":
    run(main)
