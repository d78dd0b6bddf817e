"""The rule on the runs of a study of trunks: one of its hypotheses decides a claim."""

import dataclasses
from typing import Any

from studies.claims.evidence import Evidence, MissingError
from studies.protocol.hypotheses import Hypothesis
from studies.protocol.verdict import NOT_RUN, Verdict


@dataclasses.dataclass(frozen=True)
class Trunks:
    """A ratio of perplexities, judged as the design of the study says.

    Attributes:
        files: the folder of the study's lines, and the file of its step times.
        hypothesis: what is judged.
    """

    files: tuple[str, str]
    hypothesis: Hypothesis

    @property
    def text(self) -> str:
        """With the bounds of the relation."""
        return self.hypothesis.text

    def judge(self, evidence: Evidence) -> Verdict:
        """As the hypothesis is."""
        lines, times = (evidence.files.get(path, ()) for path in self.files)
        asked = self.hypothesis
        found = asked.judge(lines, times)
        if found.word == NOT_RUN:
            raise MissingError(f"no seed of both {asked.first} and {asked.second} in {asked.part} of {self.files[0]}")
        return found


def trunks(files: tuple[str, str], **hypothesis: Any) -> Trunks:
    """The rule, from the attributes of the hypothesis but its number, which is of the study's design."""
    return Trunks(files, Hypothesis(number=0, **hypothesis))
