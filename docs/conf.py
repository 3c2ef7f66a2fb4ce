"""The site: `sphinx-build -W --keep-going -b html docs build/site`, warnings as errors.

The guide and the lessons are Markdown files that also read well where they lie; the API pages come from the docstrings.
What lies elsewhere (the benchmark results) is copied beside them first, into `docs/_generated`, which git ignores.
"""

import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from site_pages import (  # noqa: E402
    TranslatedSummaries,
    copy_results,
    links_out_of_the_docs,
)

project = "mgpu_core"
author = "the authors of mgpu_core"
version = release = "0.1.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
source_suffix = {".md": "markdown"}
exclude_patterns = ["examples/**", "lessons/exercises/**", "lessons/solutions/**"]
nitpicky = False

# Pages in other languages: messages without a translation stay English (developing.md says how catalogues are updated).
locale_dirs = ["locales"]
gettext_location = False
gettext_additional_targets = ["raw"]  # the summaries of folded blocks

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_mock_imports = [
    "transformers",
    "accelerate",
    "lightning",
    "torch_geometric",
]  # the site needs none of them
autodoc_typehints = "signature"
autodoc_class_signature = "mixed"
napoleon_numpy_docstring = False
napoleon_custom_sections = [
    (f"Args for {subject}", "params_style")
    for subject in (
        "the rows",
        "the loss",
        "the update",
        "the sums of gradients",
        "how ranks run",
    )
]
add_module_names = False
maximum_signature_line_length = 40  # longer ones have an argument a line
python_use_unqualified_type_names = True

html_theme = "furo"
html_title = "mgpu_core"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_copyright = False


def setup(app: object) -> None:
    """Copies what lies elsewhere, turns links to files outside the site into words, and translates folded blocks."""
    generated = HERE / "_generated"
    shutil.rmtree(generated, ignore_errors=True)
    copy_results(ROOT / "benchmarks" / "results", generated)
    app.connect("source-read", links_out_of_the_docs)  # type: ignore[attr-defined]
    app.add_transform(TranslatedSummaries)  # type: ignore[attr-defined]
