"""The documentation as a site: `make site` writes it to build/site."""

from __future__ import annotations

from importlib import metadata

project = "relax_disc"
release = version = metadata.version("relax-disc")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
html_theme = "furo"
html_title = f"relax_disc {version}"
myst_heading_anchors = 3  # pages link to each other's sections as GitHub does
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
default_role = "literal"
napoleon_google_docstring = False
napoleon_use_rtype = False
