"""Build the documentation from the installed package; nothing is fetched from the network."""

from importlib.metadata import version as installed_version

project = "gmm_registry"
author = "The gmm_registry authors"
version = release = installed_version("gmm_registry")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

myst_heading_anchors = 3

default_role = "py:obj"  # a name in single backquotes in a docstring links to that object
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False

html_theme = "furo"
html_title = f"gmm_registry {release}"
html_show_sphinx = False
html_copy_source = False
