"""`families.md`: a section for each row of the table of families, from docs/families/."""

from sphinx.application import Sphinx

from flash_lm.tables import FAMILIES

_HERE = "% every family\n"


def _with_sections(app: Sphinx, name: str, source: list[str]) -> None:
    if name == "families":
        include = "".join(f"```{{include}} families/{family}.md\n```\n\n" for family in FAMILIES)
        source[0] = source[0].replace(_HERE, include)


def setup(app: Sphinx) -> dict[str, bool]:
    """Fills in the page when it is read."""
    app.connect("source-read", _with_sections)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
