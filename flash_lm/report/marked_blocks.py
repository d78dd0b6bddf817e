"""Generated blocks of a Markdown page: a command writes the text between two comments."""

import re

from flash_lm.errors import InputError


def replace_block(page: str, name: str, writer: str, text: str) -> str:
    """Replaces the text of a page between `<!-- NAME: written by WRITER -->` and `<!-- end of NAME -->`.

    Raises:
        InputError: the page has not each of the two once, in this order.
    """
    begin, end = f"<!-- {name}: written by {writer} -->", f"<!-- end of {name} -->"
    changed, count = re.subn(
        f"{re.escape(begin)}.*?{re.escape(end)}", lambda match: f"{begin}\n{text}\n{end}", page, flags=re.DOTALL
    )
    if count != 1 or changed.count(begin) != 1 or changed.count(end) != 1:
        raise InputError(f"the page must have {begin} once, and {end} once after it")
    return changed
