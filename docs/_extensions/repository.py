"""Files of the repository that are not of the site.

`{repository-file} ../CHANGELOG.md` shows one as part of a page; one that does not exist yet is left out. Links to files
work on the site as they do in the repository: they lead to the page that shows the file, or to a copy of it.
"""

import os
import pathlib
import re

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

# The page that shows a file.
PAGES = {
    "../CHANGELOG.md": "changelog.md",
    "../CONTRIBUTING.md": "contributing.md",
    "../README.md": "index.md",
    "../results/CLAIMS.md": "claims.md",
    "../results/README.md": "results.md",
}
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#|/)([^)#\s]+)(?=[)#])")


def site_link(target: str, folder: str = ".") -> str:
    """A link of a file in this folder, relative to docs/, as a page has to write it."""
    path = os.path.normpath(os.path.join(folder, target)).removeprefix("../docs/")
    path = PAGES.get(path, path)
    # MyST takes what ends in .md for a page.
    return f"path:{path}" if path.startswith("../") and path.endswith(".md") else path


def with_site_links(text: str, folder: str = ".") -> str:
    """Markdown with the links of a file in this folder."""
    return _LINK.sub(lambda match: site_link(match[1], folder), text)


class RepositoryFile(SphinxDirective):
    """A Markdown file, without its first heading, which is the page's own."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """The nodes of the file."""
        _, path = self.env.relfn2path(self.arguments[0])
        file = pathlib.Path(path)
        if not file.exists():
            return []
        self.env.note_dependency(path)
        text = re.sub(r"\A# .*\n", "", file.read_text(encoding="utf-8"))
        folder = str(pathlib.PurePosixPath(self.arguments[0]).parent)
        return self.parse_text_to_nodes(with_site_links(text, folder), allow_section_headings=True)


def _links_of_a_page(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = with_site_links(source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Adds the directive."""
    app.add_directive("repository-file", RepositoryFile)
    app.connect("source-read", _links_of_a_page)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
