"""results/CLAIMS.md: what the papers and their readers claim, and what was found of it here.

python -m flash_lm.sweep --config=configs/claims.py --workdir=runs/claims \
    --config.data.corpus=hf --config.data.path=$DATA/books
python scripts/claims.py --runs=runs/claims     # takes over what is finished, and writes the page
python scripts/claims.py                        # the page alone, from the files in results/
"""

import argparse
import pathlib
import string

from configs.claims import SEEDS
from flash_lm.analysis.claims import (
    ALIKE,
    CONTRADICTED,
    NOT_RUN,
    NOT_TESTABLE,
    REPRODUCED,
    UNDECIDED,
    Claim,
    Evidence,
    Run,
    alike,
    all_of,
    better,
    better_at_equal_time,
    loses_more,
    measured,
    untestable,
)
from flash_lm.analysis.results import Line, read_jsonl, write_jsonl
from flash_lm.analysis.study_results import collect, gather, together
from flash_lm.command import run

FLASH = "FLASH (Hua et al. 2022)"
AFT = "AFT (Zhai et al. 2021)"
LINEAR = "Linear Transformer (Katharopoulos et al. 2020)"
STUDY_FILES = ("runs.jsonl", "curves.jsonl")
STUDY = (
    "`python -m flash_lm.sweep --config=configs/claims.py --workdir=runs/claims --config.data.corpus=hf "
    "--config.data.path=$DATA/books`"
)
STEPS, PLAIN = "performance/step_time/steps.jsonl", "performance/plain.jsonl"
IMAGES, COPY = "experiments/images/images.jsonl", "experiments/copy/results.jsonl"
STEP_TIME = "`python scripts/benchmark_step_time.py`"
COPYING = "`python -m flash_lm.sweep --config=configs/copy.py`"
DRAWING = "`python scripts/benchmark_images.py`"
BASELINE = "transformer_plus_plus"


def flat_in_length(evidence: Evidence) -> tuple[bool, str]:
    """FLASH's step of as many tokens costs at most 1.15 times as much in rows sixteen times as long."""
    times = [evidence.line(STEPS, family="flash", length=length)["median_ms"] for length in (512, 8192)]
    return times[1] <= 1.15 * times[0], f"a token at 8192 costs {times[1] / times[0]:.2f} times one at 512"


def faster_than_the_transformer(evidence: Evidence) -> tuple[bool, str]:
    """At 8192 by the paper's 4.9 at least, of the form that the paper compares with; the blocked one beside it."""
    plain = [evidence.line(PLAIN, family=family, length=8192)["median_ms"] for family in (BASELINE, "flash")]
    blocked = [evidence.line(STEPS, family="flash", length=n)["speedup"] for n in (512, 1024, 2048, 4096, 8192)]
    told = ", ".join(f"{speedup:.1f}" for speedup in blocked)
    return plain[0] >= 4.9 * plain[1], (
        f"{plain[0] / plain[1]:.1f} times as fast as plain attention at 8192; {told} times as fast as blocked "
        "attention at 512, 1024 … 8192"
    )


def quad_memory(evidence: Evidence) -> tuple[bool, str]:
    """The largest batch at 1024 is nearly twice the Transformer's."""
    memory = [evidence.line(STEPS, family=family, length=1024)["temp_bytes"] for family in (BASELINE, "flash_quad")]
    return memory[0] >= 1.5 * memory[1], (
        f"{memory[0] / memory[1]:.2f} rows of FLASH-Quad in the temporary memory of one of Transformer++, both blocked"
    )


def prefix_states(evidence: Evidence) -> tuple[bool, str]:
    """(n/c)·s·e numbers in mixed chunks, against n·s² of a sum for each token; at the sizes of the base model."""
    del evidence
    chunk, shared, expanded = 256, 128, 1536
    ratio = shared * shared / (shared * expanded / chunk)
    return ratio > 1, f"{ratio:.0f} times fewer at base (c = {chunk}, s = {shared}, e = {expanded})"


def copies(evidence: Evidence) -> tuple[bool, str]:
    """99 of 100 symbols are copied."""
    runs = {name: evidence.line(COPY, family=name) for name in ("transformer", "linear_transformer")}
    return all("solved_at" in run for run in runs.values()), ", ".join(
        f"{name} copies {run['accuracy']:.2%}, and 99 % from update {run.get('solved_at', 'none')} on"
        for name, run in runs.items()
    )


def drawing(images: str, way: str, paper: float) -> Claim:
    """The Linear Transformer's images a second against softmax's, with its cache or computed anew for each pixel.

    Each draws as many images at a time as suits it best.
    """

    def holds(evidence: Evidence) -> tuple[bool, str]:
        rate = lambda way: max(x["images_per_s"] for x in evidence.lines(IMAGES, images=images, way=way))
        ratio = rate("linear, recurrent state") / rate(f"softmax, {way}")
        # Another machine: half of the factor will do.
        return ratio >= paper / 2, f"{ratio:,.1f} times"

    what = {"cache": "with a cache of keys and values", "recomputed": "recomputed for each pixel"}[way]
    text = f"Linear attention draws {paper:g} times as many images a second as softmax attention {what}"
    return Claim(text, f"{LINEAR}, {images}", measured(holds), DRAWING)


CLAIMS = (
    Claim("FLASH is no worse than Transformer++ at 512", FLASH, better("flash", BASELINE, most=ALIKE), STUDY),
    Claim(
        "FLASH is no worse than Transformer++ at 4096",
        FLASH,
        better("flash_4096", f"{BASELINE}_4096", most=ALIKE),
        STUDY,
    ),
    Claim(
        "FLASH-Quad is at least as good as Transformer++ at equal training time",
        FLASH,
        better_at_equal_time("flash_quad", BASELINE),
        STUDY,
    ),
    Claim(
        "Gated attention units beat attention with a feed-forward layer at equal training time",
        FLASH,
        better_at_equal_time("flash_quad", "transformer_plus"),
        STUDY,
    ),
    Claim(
        "Local attention matters more than global, and both together are best",
        FLASH,
        all_of(better("flash_local", "flash_global"), better("flash", "flash_local"), better("flash", "flash_global")),
        STUDY,
    ),
    Claim(
        "relu² is about as good as softmax in a gated attention unit", FLASH, alike("flash_quad", "quad_softmax"), STUDY
    ),
    Claim("and so is the Laplace function", "Mega (Ma et al. 2022)", alike("flash_quad", "quad_laplace"), STUDY),
    Claim(
        "Chunks of 64 to 512 differ little",
        FLASH,
        all_of(*(alike(f"chunk_{size}", "flash") for size in (64, 256, 512))),
        STUDY,
    ),
    Claim(
        "Mixed chunks cost a Transformer++ more than they cost FLASH-Quad",
        FLASH,
        loses_more((BASELINE, "mc_tfm"), than=("flash_quad", "flash")),
        STUDY,
    ),
    Claim("Three kinds of positions are better than rotary ones alone", FLASH, better("flash", "rotary_alone"), STUDY),
    Claim(
        "A divisor that is the sample's length is as good at the length of training",
        "readers of FLASH",
        all_of(*(better(f"normalizer_{kind}", "flash", most=ALIKE) for kind in ("length", "constant"))),
        STUDY,
    ),
    Claim(
        "and worse than the count of visible keys at another length",
        "readers of FLASH",
        better("flash", "normalizer_length", length=1024),
        f"{STUDY}, then `python -m flash_lm.evaluate --lengths=1024 --split=validation --workdir=runs/claims/RUN` for "
        "each RUN of flash and normalizer_length, such as flash_seed_0",
    ),
    Claim("One head is enough for a gated attention unit", FLASH, alike("flash", "gau_heads_4"), STUDY),
    Claim("FLASH's step time is flat in the length", FLASH, measured(flat_in_length), STEP_TIME),
    Claim(
        "FLASH trains up to 12.1 times as fast as Transformer++ on PG-19, at 110M to 731M parameters",
        FLASH,
        untestable("the paper's models take 125,000 steps of 262,144 tokens on TPUs"),
        "`python scripts/reproduce.py --table=pg19`, with a cluster",
    ),
    Claim(
        "FLASH trains up to 4.9 times as fast as Transformer++", FLASH, measured(faster_than_the_transformer), STEP_TIME
    ),
    Claim(
        "FLASH-Quad's largest batch at 1024 is nearly twice the Transformer's",
        "notes on FLASH",
        measured(quad_memory),
        STEP_TIME,
    ),
    Claim(
        "Mixed chunks hold fewer prefix sums than a sum for each token", FLASH, measured(prefix_states), "arithmetic"
    ),
    Claim(
        "Overlapping local attention helps less than more layers",
        FLASH,
        better_at_equal_time("layers_3", "overlapping_chunks"),
        STUDY,
    ),
    Claim(
        "Scale and offset of one Z are as good as dense queries and keys",
        FLASH,
        better("flash", "dense_query_key", most=ALIKE),
        STUDY,
    ),
    Claim(
        "AFT-local is best with a window in the middle",
        AFT,
        all_of(better("aft_local_32", "aft_simple"), better("aft_local_32", "aft_full")),
        STUDY,
    ),
    Claim(
        "AFT-local gains from longer rows",
        AFT,
        all_of(
            better("aft_local_rows_of_1024", "aft_local_32"),
            better("aft_local_rows_of_2048", "aft_local_rows_of_1024"),
        ),
        STUDY,
    ),
    Claim(
        "AFT-simple is about as good as the Linear Transformer", AFT, alike("aft_simple", "linear_transformer"), STUDY
    ),
    Claim(
        "Linear attention converges more slowly than softmax",
        LINEAR,
        better("transformer", "linear_transformer"),
        STUDY,
    ),
    Claim("Linear attention learns to copy as softmax attention does", LINEAR, measured(copies), COPYING),
    drawing("MNIST", "recomputed", 317),
    drawing("MNIST", "cache", 18.9),
    drawing("CIFAR-10", "recomputed", 4462),
    drawing("CIFAR-10", "cache", 56),
)


def read_results(folder: pathlib.Path) -> tuple[dict[str, dict[int, Run]], dict[str, list[Line]]]:
    """The runs of the study, and the lines of the other files."""
    read = lambda path: read_jsonl(path) if path.exists() else []
    runs = gather(*(read(folder / "claims" / name) for name in STUDY_FILES))
    return runs, {name: read(folder / name) for name in (STEPS, PLAIN, IMAGES, COPY)}


def page(evidence: Evidence) -> str:
    """Markdown."""
    verdicts = [(claim, claim.verdict(evidence)) for claim in CLAIMS]
    counts = {word: sum(verdict.word == word for _, verdict in verdicts) for word in WORDS}
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    letters = {command: string.ascii_uppercase[i] for i, command in enumerate(dict.fromkeys(x.command for x in CLAIMS))}
    rows = [
        f"| {claim.text} | {claim.source} | **{verdict.word}** | {verdict.figure} | {letters[claim.command]} |"
        for claim, verdict in verdicts
    ]
    seeds = max((len(by_seed) for by_seed in evidence.runs.values()), default=0)
    return "\n".join(
        [
            "# A verdict on every claim",
            "",
            f"Of {len(CLAIMS)} claims: {told}. Written by `python scripts/claims.py` from the files in this folder.",
            "",
            "The study's models have a quarter of a million parameters and see a million tokens of books (500 steps), "
            f"with {seeds} of {len(SEEDS)} seeds so far. A verdict needs every seed to say the same, and two of them "
            f"at least; else it is undecided. Perplexities within a factor of {ALIKE} are alike. What holds after so "
            "few steps of such small models need not hold for those of the papers, and what fails need not fail there. "
            "Times are each run's own median time of a step, on one thread of a CPU beside another run.",
            "",
            "| claim | of | verdict | figure | made by |",
            "|---|---|---|---|---|",
            *rows,
            "",
            *(f"- {letter}: {command}" for command, letter in letters.items()),
        ]
    )


WORDS = (REPRODUCED, UNDECIDED, CONTRADICTED, NOT_TESTABLE, NOT_RUN)


def main(argv: list[str]) -> None:
    """Writes CLAIMS.md to OUT."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--runs", type=pathlib.Path, help="folder of the sweep of configs/claims.py, to be taken over")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("results"), help="folder of the results")
    arguments = parser.parse_args(argv)
    if arguments.runs:
        study = arguments.out / "claims"
        study.mkdir(parents=True, exist_ok=True)
        for name, lines in zip(STUDY_FILES, collect(arguments.runs), strict=True):
            write_jsonl(study / name, together(read_jsonl(study / name) if (study / name).exists() else [], lines))
    text = page(Evidence(*read_results(arguments.out)))
    (arguments.out / "CLAIMS.md").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    run(main)
