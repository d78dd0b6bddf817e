"""Files of the repository that are not of the site.

`{repository-file} ../CHANGELOG.md` shows one as part of a page; one that does not exist yet is left out. Links to files
work on the site as they do in the repository: they lead to the page that shows the file, or to a copy of it.
"""

import os
import pathlib
import re
import shutil

from sphinx.application import Sphinx

_DOCS = pathlib.Path(__file__).parents[1]
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(?=[)#])")
_FILE = re.compile(r"^```\{repository-file\} (\S+)\n```$", re.MULTILINE)
# file -> the page that shows it
PAGES = {"../README.md": "index.md"} | {
    file: page.name for page in sorted(_DOCS.glob("*.md")) for file in _FILE.findall(page.read_text(encoding="utf-8"))
}


def site_link(target: str, folder: str = ".") -> str:
    """A link of a file in this folder, relative to docs/, as a page has to write it."""
    path = os.path.normpath(os.path.join(folder, target)).removeprefix("../docs/")
    path = PAGES.get(path, path)
    if path.startswith("../notebooks/"):  # they are pages
        path = path.removeprefix("../")
    # MyST takes what ends in .md for a page.
    return f"path:{path}" if path.startswith("../") and path.endswith(".md") else path


def with_site_links(text: str, folder: str = ".") -> str:
    """Markdown with the links of a file in this folder."""
    return _LINK.sub(lambda match: site_link(match[1], folder), text)


def _as_a_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Before a page is parsed: directives need not carry headings, which Sphinx allows at the top of a page only."""

    def text_of(match: re.Match) -> str:
        file = pathlib.Path(app.srcdir) / match[1]
        if not file.exists():
            return ""
        app.env.note_dependency(str(file), docname=name)
        # The page has a heading already.
        text = re.sub(r"\A# .*\n", "", file.read_text(encoding="utf-8"))
        return with_site_links(text, str(pathlib.PurePosixPath(match[1]).parent))

    # Links of a page in a folder are relative to it, and so are those that it has to write.
    folder = str(pathlib.PurePosixPath(name).parent)
    to_folder = lambda match: _from_folder(site_link(match[1], folder), folder)
    source[0] = _FILE.sub(text_of, _LINK.sub(to_folder, source[0]))


def _from_folder(link: str, folder: str) -> str:
    """A link relative to docs/ as a page in a folder below it has to write it."""
    prefix, colon, path = link.rpartition(":")
    return prefix + colon + os.path.relpath(path, folder)


def _copy_notebooks(app: Sphinx, config: object) -> None:
    """Copies the notebooks to where Sphinx looks for pages."""
    folder = _DOCS / "notebooks"
    folder.mkdir(exist_ok=True)
    for file in (_DOCS.parent / "notebooks").glob("*.ipynb"):
        if not (copy := folder / file.name).exists() or copy.read_bytes() != file.read_bytes():
            shutil.copyfile(file, copy)


def setup(app: Sphinx) -> dict[str, bool]:
    """Fills in pages when they are read."""
    app.connect("config-inited", _copy_notebooks)
    app.connect("source-read", _as_a_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
