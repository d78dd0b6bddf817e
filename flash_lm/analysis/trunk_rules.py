"""The rule on the runs of a study of trunks: one of its hypotheses decides a claim."""

import dataclasses

from flash_lm.analysis.evidence import Evidence, MissingError
from flash_lm.analysis.hypotheses import FAILS, HOLDS, Hypothesis
from flash_lm.analysis.verdicts import CONTRADICTED, NOT_RUN, REPRODUCED, UNDECIDED, Verdict

_WORDS = {HOLDS: REPRODUCED, FAILS: CONTRADICTED}


@dataclasses.dataclass(frozen=True)
class Trunks:
    """A ratio of perplexities that was judged as the study's design says, see `Hypothesis`.

    Attributes:
        files: the folder of the study's lines, and the file of its step times.
    """

    files: tuple[str, str]
    part: str
    first: str
    relation: str
    second: str
    slice: str | None = None
    at_equal_time: bool = False

    @property
    def text(self) -> str:
        """With the bounds of the relation."""
        return self._hypothesis.text

    def judge(self, evidence: Evidence) -> Verdict:
        """As the hypothesis is."""
        lines, times = (evidence.files.get(path, ()) for path in self.files)
        found = self._hypothesis.judge(lines, times)
        if found["verdict"] == NOT_RUN:
            raise MissingError(f"no seed of both {self.first} and {self.second} in {self.part} of {self.files[0]}")
        own = (x for x in lines if x["part"] == self.part and x["run"] in (self.first, self.second))
        return Verdict(_WORDS.get(found["verdict"], UNDECIDED), found["figure"], (), tuple(own))

    @property
    def _hypothesis(self) -> Hypothesis:
        of = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "files"}
        return Hypothesis(number=0, **of)
