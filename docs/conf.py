"""Sphinx configuration: ``make docs`` builds the site into build/docs/html."""

import re
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_VERSION = re.search(
    r'^__version__ = "(.*)"$', (_ROOT / "deepreduce_hvd" / "__init__.py").read_text(), re.MULTILINE
)[1]

project = "deepreduce-hvd"
author = "The deepreduce-hvd developers"
copyright = f"2026, {author}"
version = release = _VERSION

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
exclude_patterns = []

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_title = f"deepreduce-hvd {release}"
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
