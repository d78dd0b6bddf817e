"""Claims of papers and of this project; a claim's verdict follows from its rules and from result lines."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from studies.claims.evidence import Evidence, MissingError
from studies.claims.rules import RULES, ClaimRule
from studies.protocol.verdict import FAILS, NOT_RUN, UNDECIDED, Verdict


@dataclasses.dataclass(frozen=True)
class Claim:
    """A sentence of a paper, or of this project on it.

    Attributes:
        text: the claim.
        source: who made it.
        rules: the claim holds if all rules hold, and fails if one fails.
        commands: the commands that produce its evidence.
        withdrawn: why this evidence allows no verdict, whatever its numbers; empty: it does.
        note: a remark on the figure.
        change: what would change the verdict.
    """

    text: str
    source: str
    rules: Sequence[ClaimRule]
    commands: Sequence[str]
    withdrawn: str = ""
    note: str = ""
    change: str = ""

    def verdict(self, evidence: Evidence) -> Verdict:
        """Returns the verdict on the evidence, or `NOT_RUN` if evidence is missing."""
        try:
            verdicts = [rule.judge(evidence) for rule in self.rules]
        except MissingError as missing:
            return Verdict(NOT_RUN, str(missing))
        words = [verdict.word for verdict in verdicts if verdict.word]
        word = next((word for word in (FAILS, UNDECIDED) if word in words), words[0])
        reasons = dict.fromkeys(reason for verdict in verdicts for reason in verdict.reasons)
        if self.withdrawn:
            word, reasons = UNDECIDED, {f"withdrawn: {self.withdrawn}": None} | reasons
        figure = "; ".join(verdict.figure for verdict in verdicts)
        lines = tuple(line for verdict in verdicts for line in verdict.lines)
        return Verdict(word, f"{figure}; {self.note}" if self.note else figure, tuple(reasons), lines)


def read_claim(row: Mapping[str, Any], commands: Sequence[str]) -> Claim:
    """Builds a claim from a row of claims.toml; each rule in it has a key `rule` of RULES and that rule's fields."""
    rules = [RULES[part["rule"]](**{key: x for key, x in part.items() if key != "rule"}) for part in row["rules"]]
    remarks = {key: row.get(key, "") for key in ("withdrawn", "note", "change")}
    return Claim(row["text"], row["source"], rules, commands, **remarks)
