"""A new stabilizer is one file; an incomplete one fails at import."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trl_stppo
from trl_stppo.trainer.stabilizers import STABILIZERS, Stabilizer, register

PACKAGE = Path(trl_stppo.__file__).parent
TOY = '''
from typing import Any

from .base import STEP, Stabilizer, register


@register
class Halving(Stabilizer):
    """Halves a step of which something is clipped, and counts such steps."""

    name, meaning, scale_target = "halving", "halves a step of which something is clipped", STEP

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.count = 0

    @classmethod
    def check(cls, config: Any) -> None:
        if config.max_grad_norm == 7.0:
            raise ValueError(f"`max_grad_norm={config.max_grad_norm}`: not supported with 'halving'.")

    def scale(self, kept_norm: Any, clipped_norm: Any) -> float:
        self.count += bool(clipped_norm > 0)
        return 0.5 if clipped_norm > 0 else 1.0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state.get("count", 0)
'''
RUN = """
import json, sys
import pytest
from tests.kit.scripted import scripted_trainer
from trl_stppo import STPPOConfig
from trl_stppo.cli.main import main

main(["train", "--help"])
for refused in ({"stabilizers": ["share", "halving"]}, {"stabilizers": "halving", "max_grad_norm": 7.0}):
    with pytest.raises(ValueError, match="halving"):
        STPPOConfig("out", use_cpu=True, bf16=False, **refused)
settings = dict(stabilizers=["halving"], num_ppo_epochs=2, rows=32)
settings |= dict(save_steps=2, save_strategy="steps")
whole, _ = scripted_trainer(sys.argv[1], max_steps=4, **settings)
whole.train()
resumed, _ = scripted_trainer(sys.argv[1], max_steps=4, **settings)
resumed.train(resume_from_checkpoint=sys.argv[1] + "/checkpoint-2")
scales = [entry["clip_bias/scale"] for entry in whole.state.log_history if "clip_bias/scale" in entry]
counts = [trainer._optimizer_step.stabilizers[0].count for trainer in (whole, resumed)]
print(json.dumps({"scales": scales, "counts": counts}))
"""


@pytest.mark.long
def test_a_new_file_is_a_new_stabilizer(tmp_path):
    copy = shutil.copytree(PACKAGE, tmp_path / "copy" / "trl_stppo")
    (copy / "trainer" / "stabilizers" / "halving.py").write_text(TOY)
    (tmp_path / "run.py").write_text(RUN)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), str(tmp_path / "run")],
        env={"PYTHONPATH": f"{copy.parent}:{PACKAGE.parent}", "HF_HUB_OFFLINE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    text = " ".join(done.stdout.split())
    assert "'halving' halves a step of which something is clipped" in text
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found["scales"]) == {0.5}
    assert found["counts"][0] == found["counts"][1] == found["scales"].count(0.5)


@pytest.mark.parametrize(("fields", "problem"), [
    ({"name": "", "meaning": "x"}, "needs a `name`"),
    ({"name": "share", "meaning": "x"}, "another one"),
    ({"name": "none", "meaning": "x"}, "another one"),
    ({"name": "new", "meaning": "x"}, "overrides neither"),
    ({"name": "new", "meaning": "x", "scale": lambda *norms: 1.0}, "needs both"),
    ({"name": "new", "meaning": "x", "scale_target": "step"}, "needs both"),
    (
        {"name": "new", "meaning": "x", "scale_target": "gradient", "scale": lambda *_: 1.0},
        "needs_exact_norms",
    ),
])  # fmt: skip
def test_an_incomplete_one_is_refused(fields, problem):
    with pytest.raises(TypeError, match=problem):
        register(type("New", (Stabilizer,), fields))
    assert "new" not in STABILIZERS
