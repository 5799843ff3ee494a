"""The documentation site: `make docs` builds it without network and treats every warning as an error."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent)]

from trl_stppo import __version__  # noqa: E402

project = "trl-stppo"
release = version = __version__
project_copyright = "trl-stppo, Apache-2.0"

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    # Our own, in _ext/.
    "api_text",
    "config_table",
    "mathml",
    "page_links",
    "wide_tables",
]
exclude_patterns = ["_build"]
nitpicky = True
# Types of other packages, whose inventories would need the network.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|transformers|trl|datasets|accelerate|peft|numpy|huggingface_hub)(\..*)?"),
    (
        r"py:.*",
        r"(collections|contextlib|dataclasses|enum|pathlib|typing|threading|argparse|os)\..*",
    ),
    (r"py:.*", r"(Any|Callable|Iterable|Iterator|Mapping|Sequence|Tensor|Path|optional)"),
    (r"py:.*", r"PreTrained(Model|TokenizerBase)"),
    # Rollouts, and numbers or tensors, are described where they occur.
    (r"py:.*", r"trl_stppo\.(core\.policy\.Scalar|trainer\.loop\.rollout\.(Played|Scored))"),
    # What an episode holds of its images (docs/images.md).
    (r"py:.*", r"trl_stppo\.rollout\.images\.Image"),
    # The protocol of samplers, which scripts/verifier/ wraps.
    (r"py:.*", r"(trl_stppo\.generation\.protocol\.)?(Backend|TurnRequest)"),
    (r"py:.*", r"trl_stppo\.rollout\.chat\.ChatRenderer"),
]

# Pages are plain Markdown that GitHub shows as well; a fence named math is a formula in both.
myst_heading_anchors = 4
myst_fence_as_directive = ["math"]
html_math_renderer = "mathml"

autodoc_default_options = {"members": True}
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_use_admonition_for_references = True
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
default_role = "code"

html_theme = "furo"
pygments_dark_style = "github-dark"  # the default underlines names as if they were links
html_title = f"trl-stppo {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
