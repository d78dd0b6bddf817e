"""Rule for claims that a hypothesis of a study of trunks decides."""

import dataclasses
from typing import Any

from studies.claims.evidence import Evidence, MissingError
from studies.protocol.hypotheses import Hypothesis
from studies.protocol.verdict import NOT_RUN, Verdict


@dataclasses.dataclass(frozen=True)
class TrunksRule:
    """A ratio of perplexities, judged by the rule of the study.

    Attributes:
        files: paths of the study's lines and of its step times.
        hypothesis: the hypothesis of the study.
    """

    files: tuple[str, str]
    hypothesis: Hypothesis

    @property
    def text(self) -> str:
        """The hypothesis, with the bounds of its relation."""
        return self.hypothesis.text

    def judge(self, evidence: Evidence) -> Verdict:
        """Returns the verdict on the hypothesis; raises MissingError if no seed has both models."""
        lines, times = (evidence.files.get(path, ()) for path in self.files)
        hypothesis = self.hypothesis
        verdict = hypothesis.judge(lines, times)
        if verdict.word == NOT_RUN:
            raise MissingError(
                f"no seed of both {hypothesis.first} and {hypothesis.second} in {hypothesis.part} of {self.files[0]}"
            )
        return verdict


def trunks_rule(files: tuple[str, str], **hypothesis: Any) -> TrunksRule:
    """Builds the rule from the attributes of a hypothesis, except its number in the study's design."""
    return TrunksRule(files, Hypothesis(number=0, **hypothesis))
