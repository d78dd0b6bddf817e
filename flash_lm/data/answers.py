"""Output types of models (text, filled masks, labels): their rows, config checks, commands and printed text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flash_lm.config.experiment import Config
from flash_lm.config.registry import FAMILIES

if TYPE_CHECKING:  # numpy, and what imports it, is not for a command's --help
    from flash_lm.data.conditioning import Conditioning
    from flash_lm.data.packing import Packer


class Answers:
    """An output type; this base class is for tasks whose models produce no answer.

    Attributes:
        continues: whether they continue a prompt, token by token.
        kind: what `generate` calls them, when it refuses flags of others.
        scored: what `evaluate` prints before "token".
        instead: of continuing a text: the beginning of an advice.
    """

    continues = False
    kind = "causal"
    scored = ""
    instead = ""

    def written(self, corpus: str | None) -> str | None:
        """The kind of output of a model, from that of its corpus; it selects a service, and what `generate` prints."""
        return None

    def packer(self, conditioning: Conditioning, pack: str) -> Packer:
        """The packer that makes the sequences of a split, for the model's conditioning and `data.pack`."""
        return conditioning.packer(pack)

    def problems(self, config: Config) -> list[str]:
        """Sentences on keys that do not go together."""
        if not config.data.packed:
            return []
        return [
            f"model.family={name} cannot separate packed documents: data.pack={config.data.pack} must be stream"
            for name in dict.fromkeys(config.model.families)
            if "packed" not in FAMILIES[name].serves
        ]

    def about_rows(self, split: Any, length: int) -> dict[str, float]:
        """Further entries of a result, on the rows that were scored, of `length` tokens."""
        return {}


class _Continue(Answers):
    """Continues a prompt in the form of the corpus: text, second lines or images."""

    continues = True

    def written(self, corpus: str | None) -> str | None:
        return corpus


class _FillIn(Answers):
    """Fills in masked tokens."""

    kind = "masked"
    scored = " masked"
    instead = "let it fill in [MASK]s, or "

    def written(self, corpus: str | None) -> str | None:
        return "fill_in"


class _Label(Answers):
    """Predicts the label of a row, which is its only target."""

    def written(self, corpus: str | None) -> str | None:
        return "label"

    def packer(self, conditioning: Conditioning, pack: str) -> Packer:
        from flash_lm.data.labelled import LabelledRows  # noqa: PLC0415 (not for benchmarks)

        return LabelledRows

    def problems(self, config: Config) -> list[str]:
        # A corpus with labels, and the only metric that a classifier always has.
        sentences, task, corpus = [], config.task, config.data.corpus
        if not config.has_labels:
            sentences.append(
                f"task={task} needs labels, and data.corpus={corpus} has none: use one with labels, such as hf with "
                "data.label_column"
            )
        if config.train.best_metric != "loss":
            sentences.append(f"task={task} has no {config.train.best_metric}: set --config.train.best_metric=loss")
        return sentences

    def about_rows(self, split: Any, length: int) -> dict[str, float]:
        from flash_lm.data.labelled import cut_share  # noqa: PLC0415 (not for benchmarks)

        return {"cut": cut_share(split, length)}


NOTHING, CONTINUE, FILL_IN, LABEL = Answers(), _Continue(), _FillIn(), _Label()
ANSWERS: dict[str | None, Answers] = {None: NOTHING, "continue": CONTINUE, "fill_in": FILL_IN}
