"""The notebook runs from its first cell to its last, without Jupyter."""

import json
import sys
from importlib.resources import files

from scripts.makers.tutorial_notebook import NOTEBOOK, execute

SHORTER = {"range(300)": "range(3)", "10_240": "256", "games * 40": "games"}


def test_it_runs_and_shows_curves_and_episodes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.delitem(sys.modules, "environment", raising=False)
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = [cell["source"] for cell in cells if cell["cell_type"] == "code"]
    train = files("trl_stppo.cli").joinpath("template", "small", "train.py.txt").read_text()
    assert train.rstrip() in sources, "what the tutorial shows"
    namespace, kinds = {"__name__": "__main__"}, []
    for source in sources:
        for long, short in SHORTER.items():
            source = source.replace(long, short)
        kinds += [key for output in execute(source, namespace) for key in output.get("data", {})]
    sys.modules.pop("environment", None)
    assert kinds[-2:] == ["image/png", "text/html"]
    shown = [key for cell in cells for o in cell.get("outputs", []) for key in o.get("data", {})]
    assert shown[-2:] == kinds[-2:], "the outputs that readers see on a page are in the file"
