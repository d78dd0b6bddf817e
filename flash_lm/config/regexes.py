"""Validates regexes of a config: they must match in bounded time, since a config may come from somebody else.

Python tries all ways in which the parts of a regex can share a text. Their number is exponential if a group is
repeated, and else at most the text's length to the power of the repeats, times the ways through alternatives.
"""

import math
import re
from typing import Any

MOST_REGEXES = 100  # of a key
_LONGEST, _MOST_REPEATS, _MOST_WAYS = 200, 3, 1000
_ONE_CHARACTER = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)  # an escape, or a class
_NEVER = {r"\)[*+{]": "repeats a group", r"\(\?(?:P=|\()": "refers back to a group"}


def regex_problem(regex: Any) -> str | None:
    """The problem of a value as a regex that is matched in bounded time; None: it is one."""
    if not isinstance(regex, str):
        return "is not a text"
    if len(regex) > _LONGEST:
        return f"has more than {_LONGEST} characters"
    try:
        re.compile(regex)
    except (re.error, OverflowError) as error:
        return f"is not a regex ({error})"
    if re.search(r"\\[1-9]", regex):
        return "refers back to a group"
    # With every escape and class as one character, the remaining signs are operators.
    plain = _ONE_CHARACTER.sub("x", regex)
    if wrong := [why for pattern, why in _NEVER.items() if re.search(pattern, plain)]:
        return wrong[0]
    if len(re.findall("[*+{]", plain)) > _MOST_REPEATS:
        return f"has more than {_MOST_REPEATS} repeats (* + {{…}})"
    return f"has more than {_MOST_WAYS} ways through its alternatives" if _ways(plain) > _MOST_WAYS else None


def _ways(plain: str) -> int:
    """An upper bound on the number of ways through the alternatives and optional parts of a regex."""
    # The number of alternatives of each group, and 2 for each optional part, of which the product is taken.
    open_, closed = [1], []
    for before, sign in zip(" " + plain, plain, strict=False):
        if sign == "(":
            open_.append(1)
        elif sign == ")":
            closed.append(open_.pop())
        elif sign == "|":
            open_[-1] += 1
        elif sign == "?" and before not in "(*+?}":
            closed.append(2)
    return math.prod(open_ + closed)
