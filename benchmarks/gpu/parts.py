"""The parts of the GPU's scripts, in the order of what they tell: their commands, time limits and packages."""

import pathlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

SECONDS = "{seconds}"  # in a command: the seconds that its part has left when it starts
# The Transformer's best form, ours, and the two kinds of state that the field trains: sums, and the delta rule.
FAMILIES = "transformer_plus_plus flash linear_transformer gated_deltanet"
_TEXTS = ("books", "wiki")  # each is long enough for the curve; the first that is there
TRUNK = ("transformer_plus_plus", "flash")
Words = list[str]


class Settings(NamedTuple):
    """What the commands depend on.

    Attributes:
        out: folder of the results.
        data: folder of the corpora, or of one; None: the texts that every machine has.
        python: interpreter with PyTorch and flash-linear-attention.
        rehearse: a hundredth of the size, on a CPU.
    """

    out: pathlib.Path
    data: pathlib.Path | None
    python: str
    rehearse: bool


class Part(NamedTuple):
    """A part.

    Attributes:
        what: what it measures, for the list of parts.
        seconds: its time limit, unless earlier parts leave some of theirs; at most `MOST`.
        needs: modules that a machine may lack; without one the part is skipped.
        commands: words after `python -m`, by priority.
        reads_data: whether it reads --data, for which a machine may lack a package, too.
    """

    what: str
    seconds: int
    needs: tuple[str, ...]
    commands: Callable[[Settings], list[Words]]
    reads_data: bool = False

    def missing(self, settings: Settings, is_installed: Callable[[str], bool]) -> list[str]:
        """Returns the modules that it needs and this Python does not have."""
        more = ("datasets",) if self.reads_data and settings.data else ()
        return [module for module in (*self.needs, *more) if not is_installed(module)]


def softmax(settings: Settings) -> list[Words]:
    """Softmax attention by the library that `auto` takes: what all other parts rely on, checked before them."""
    size = ["--rehearse"] if settings.rehearse else []
    return [["benchmarks.gpu.softmax", *size, f"--seconds={SECONDS}", f"--out={settings.out}/softmax"]]


def curve(settings: Settings) -> list[Words]:
    """Perplexity against training time; the study has the models and budgets."""
    there = [settings.data / name for name in _TEXTS if (settings.data / name).exists()] if settings.data else []
    text = there[0] if there else settings.data
    return [["studies.gpu.curve", *_data(text), *_study(settings, "curve")]]


def fleet(settings: Settings) -> list[Words]:
    """Jobs left in the queue of the controls, each model's rates and seeds as one program."""
    return [["studies.gpu.fleet", *_data(settings.data), *_study(settings, "fleet")]]


def steps(settings: Settings) -> list[Words]:
    """Step times: families at two lengths, then the same step with other slices of the loss, scanned and unrolled."""
    if settings.rehearse:
        size = ["--size=tiny", "--dtype=bfloat16", "--tokens_per_step=512", "--config.data.vocab_size=2048"]
        lengths, slices = "64 256", (8, 64, 512)
    else:
        size = ["--size=base", "--dtype=bfloat16", "--tokens_per_step=65536"]
        lengths, slices = "2048 8192", (1024, 8192, 65536)
    shared = ["benchmarks.steps.step_time", *size, "--config.model.remat=none", "--rounds=1", f"--seconds={SECONDS}"]
    variants = lambda scanned: " ".join(
        f"{family}+scan_layers={scanned}+train.loss_chunk={tokens}" for family in TRUNK for tokens in slices
    )
    one_length = f"--lengths={lengths.split()[0]}"
    return [
        [*shared, f"--families={FAMILIES}", f"--lengths={lengths}", f"--out={settings.out}/step_time"],
        [*shared, f"--families={variants(True)}", one_length, f"--out={settings.out}/scanned"],
        [*shared, f"--families={variants(False)}", one_length, f"--out={settings.out}/unrolled"],
    ]


def decode(settings: Settings) -> list[Words]:
    """Time per token at three batch sizes."""
    if settings.rehearse:
        size = ["--config=configs/tiny.py", "--contexts=64", "--batches=1 2 4", "--config.model.vocab_size=2048"]
        size += ["--tokens=4", "--config.model.chunks.size=16"]
    else:
        size = ["--config=configs/flash_base.py", "--contexts=8192", "--batches=1 16 128"]
        size += ["--config.model.vocab_size=32000"]
    shared = ["benchmarks.decoding.token_time", f"--families={FAMILIES}", "--rounds=1", "--no_prefill"]
    return [[*shared, *size, f"--seconds={SECONDS}", f"--out={settings.out}/decode"]]


def races(settings: Settings) -> list[Words]:
    """Our cores and flash-linear-attention's kernels."""
    size = ["--shapes=1x128x2x16", "--calls=1"] if settings.rehearse else []
    shared = ["benchmarks.gpu.races", f"--python={settings.python}", "--rounds=1", f"--seconds={SECONDS}"]
    return [[*shared, *size, f"--out={settings.out}/races"]]


def kernels(settings: Settings) -> list[Words]:
    """Our kernels: checked against the forms that XLA compiles, then timed."""
    if settings.rehearse:
        size = ["--config=configs/tiny.py", "--lengths=16", "--tokens=32", "--calls=1", "--families=flash"]
        size += ["--config.model.num_layers=1", "--config.model.chunks.size=8", "--config.data.vocab_size=300"]
    else:
        size = ["--families=flash flash_quad linear_transformer mamba2", "--lengths=2048 8192"]
    return [["benchmarks.kernels", *size, "--rounds=1", f"--seconds={SECONDS}", f"--out={settings.out}/kernels"]]


def peers(settings: Settings) -> list[Words]:
    """Training steps of PyTorch, compiled, and ours."""
    if settings.rehearse:
        size = ["--config=configs/tiny.py", "--lengths=64", "--tokens_per_step=256", "--config.data.vocab_size=300"]
    else:
        size = ["--config=configs/flash_base.py", "--lengths=2048 8192", "--tokens_per_step=32768", "--dtype=bfloat16"]
    shared = ["benchmarks.peers.speed", f"--python={settings.python}", "--peers=sdpa", "--rounds=1"]
    return [[*shared, *size, f"--seconds={SECONDS}", f"--out={settings.out}/peers"]]


_TRAINING = ("grain", "orbax.checkpoint", "sentencepiece", "tensorboardX", "tqdm", "pyarrow")
MOST = 240  # seconds of a part, with what earlier ones have left
# All together take 14 minutes. A part that ends earlier leaves its time to the later ones.
PARTS: Mapping[str, Part] = {
    "softmax": Part("softmax attention by cuDNN, checked and timed", 60, (), softmax),
    "curve": Part("perplexity against training time", 210, _TRAINING, curve, reads_data=True),
    "fleet": Part("what the studies have not made", 100, _TRAINING, fleet, reads_data=True),
    "steps": Part("step times and MFU", 180, (), steps),
    "decode": Part("time per token at batch 1, 16 and 128", 85, ("orbax.checkpoint",), decode),
    "races": Part("our cores and flash-linear-attention's kernels", 80, (), races),
    "kernels": Part("our kernels, checked and timed", 45, (), kernels),
    "peers": Part("a step of PyTorch, compiled, and ours", 80, (), peers),
}


def _data(folder: pathlib.Path | None) -> Words:
    return [f"--data={folder}"] if folder else []


def _study(settings: Settings, name: str) -> Words:
    # A rehearsal's runs are apart: a run of the full size would go on from them.
    runs = "runs/gpu/rehearsal/runs" if settings.rehearse else "runs/gpu"
    words = [f"--seconds={SECONDS}", f"--workdir={runs}/{name}", f"--out={settings.out}/{name}"]
    return [*words, "--rehearse"] if settings.rehearse else words
