"""Execute docs/tutorial.ipynb anew, and write its outputs into it.

    python scripts/makers/tutorial_notebook.py

Its cells are plain Python, so neither this nor its test needs Jupyter.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import io
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

NOTEBOOK = Path(__file__).resolve().parents[2] / "docs" / "tutorial.ipynb"


def execute(cell: str, namespace: dict[str, Any]) -> list[dict[str, Any]]:
    """Execute a cell as Jupyter does; return its outputs."""
    tree = ast.parse(cell)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), namespace)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": printed.getvalue()})
    data: dict[str, str] = {}
    if hasattr(value, "_repr_png_"):
        data["image/png"] = base64.b64encode(value._repr_png_()).decode()
    elif hasattr(value, "_repr_html_"):
        data["text/html"] = value._repr_html_()
    elif value is not None:
        data["text/plain"] = repr(value)
    if data:
        outputs.append({"output_type": "display_data", "data": data, "metadata": {}})
    return outputs


def main() -> None:
    """Execute the code cells in an empty folder."""
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        sys.path.insert(0, "")  # cells import from the folder that they make
        for cell in book["cells"]:
            if cell["cell_type"] == "code":
                cell["outputs"] = execute(cell["source"], namespace)
    NOTEBOOK.write_text(json.dumps(book, indent=1) + "\n", encoding="utf-8")
    print(NOTEBOOK)


if __name__ == "__main__":
    main()
