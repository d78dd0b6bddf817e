"""How Sphinx builds the site: `make docs`, into docs/_build/html. It needs no network, and neither do its readers."""

import pathlib
import sys

_HERE = pathlib.Path(__file__).parent
sys.path[:0] = [str(_HERE / "_extensions"), str(_HERE.parent), str(_HERE / "tools")]

project = "flash_lm"
author = "the authors of flash_lm"
html_title = "flash_lm"

extensions = [
    "myst_nb",
    "sphinx_copybutton",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "docstrings",
    "mathml",
    "results",
    "repository",
    "family_pages",
]
exclude_patterns = ["_build"]
# Notebooks show the output that they were saved with.
nb_execution_mode = "off"
myst_enable_extensions = ["dollarmath", "colon_fence", "attrs_inline"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # a file that is included may begin at any level

nitpicky = True
# Types of other packages, and of arguments that no page describes, have no page to link to.
nitpick_ignore_regex = [("py:.*", r".*")]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_use_rtype = False
highlight_language = "text"

html_theme = "furo"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_show_search_summary = False  # it needs a server, and pages are also opened as files
