"""A part of a page that a command writes: what stands between two comments of Markdown."""

import re

from flash_lm.errors import InputError


def replaced(page: str, name: str, writer: str, text: str) -> str:
    """The page with this text between `<!-- NAME: written by WRITER -->` and `<!-- end of NAME -->`.

    Raises:
        InputError: the page has not each of the two once, in this order.
    """
    begin, end = f"<!-- {name}: written by {writer} -->", f"<!-- end of {name} -->"
    found, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda match: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL
    )
    if count != 1 or found.count(begin) != 1 or found.count(end) != 1:
        raise InputError(f"the page must have {begin} once, and {end} once after it")
    return found
