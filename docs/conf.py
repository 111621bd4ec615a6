"""The documentation site: `make docs` builds it, `make docs-serve` serves it."""

import os
import sys
from importlib import metadata
from pathlib import Path

DOCS = Path(__file__).parent
ROOT = DOCS.parent
sys.path[:0] = [str(DOCS / "_ext"), str(ROOT / "src")]

project = "iternorm"
author = "The iternorm authors"
copyright = author
try:
    release = metadata.version("iternorm").partition("+")[0]
except metadata.PackageNotFoundError:
    release = ""
version = release

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_gallery.gen_gallery",
    "accessible",
    "mathml",
    "repository",
    "results",
    "summaries",
]
exclude_patterns = ["_build", "gallery", "auto_gallery/**/*.zip", "auto_gallery/**/*.md5", "**/*.ipynb"]
suppress_warnings = ["config.cache"]
# Indented blocks are drawings and commands.
highlight_language = "none"
default_role = "code"

myst_enable_extensions = ["dollarmath", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 4
myst_dmath_double_inline = True

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_exclude = ".linenos, .gp, .go"

pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = f"iternorm {release}".strip()
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_sphinx = False
html_theme_options = {
    "top_of_page_buttons": [],
    "light_css_variables": {
        "color-brand-primary": "#006b4e",
        "color-brand-content": "#00664a",
        "color-api-name": "#00664a",
        "color-api-pre-name": "#00664a",
    },
    "dark_css_variables": {
        "color-brand-primary": "#4cc9a0",
        "color-brand-content": "#5fd3ae",
        "color-api-name": "#5fd3ae",
        "color-api-pre-name": "#5fd3ae",
    },
}
# GitHub Actions says where the repository is; elsewhere the pages have no link to their source.
if repository := os.environ.get("GITHUB_REPOSITORY"):
    server = os.environ.get("GITHUB_SERVER_URL", "https://github.com")
    html_theme_options |= {
        "source_repository": f"{server}/{repository}/",
        "source_branch": os.environ.get("GITHUB_REF_NAME", "main"),
        "source_directory": "docs/",
        "top_of_page_buttons": ["view", "edit"],
    }


def _figure_style(gallery_conf: dict, name: str) -> None:
    """Each script of the gallery starts with a look that reads on white and on black pages."""
    import matplotlib as mpl
    import torch

    mpl.rcdefaults()
    mpl.use("agg")
    grey = "#7d8590"
    mpl.rcParams.update(
        {
            **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "axes.titlecolor"), grey),
            **dict.fromkeys(("xtick.color", "ytick.color", "grid.color"), grey),
            **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), "none"),
            "savefig.transparent": True,
            "savefig.dpi": 160,
            "legend.frameon": False,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": False,
            "grid.alpha": 0.35,
            "font.size": 11,
            "lines.linewidth": 2,
            "figure.constrained_layout.use": True,
        }
    )
    torch.manual_seed(0)
    # The networks are too small to gain from a second thread, which a busy machine makes wait.
    torch.set_num_threads(1)


sphinx_gallery_conf = {
    "examples_dirs": "gallery",
    "gallery_dirs": "auto_gallery",
    "filename_pattern": r"\.py",
    "reset_modules": (_figure_style,),
    "abort_on_example_error": True,
    "download_all_examples": False,
    "show_signature": False,
    "remove_config_comments": True,
    "show_memory": False,
    "write_computation_times": False,
    "within_subsection_order": "FileNameSortKey",
    "min_reported_time": 1000,
    "image_srcset": [],
    "copyfile_regex": r".*\.(?:png|json)$",
    "plot_gallery": os.environ.get("ITERNORM_GALLERY", "1") != "0",
}

linkcheck_ignore = [r"https?://"]
linkcheck_anchors = True
