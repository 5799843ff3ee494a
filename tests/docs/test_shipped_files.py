"""`trl-stppo train --dry_run` passes every file in scripts/configs."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.dry_run_kit import launcher_of
from tests.fake_gem import install
from tests.script_kit import ROOT
from trl_stppo.trainer.stgrpo_config import GROUP_VARIANTS
from trl_stppo.trainer.stppo_config import VARIANTS

CONFIGS = sorted((ROOT / "scripts" / "configs").rglob("*.yaml"))


def variants_of(path: Path) -> list[str]:
    return list(GROUP_VARIANTS if path.stem.endswith("_grpo") else VARIANTS)


def cases() -> list[tuple[Path, str]]:
    """Each file as it is, and all variants of one with a critic and one without."""
    every = [path for path in CONFIGS if path.stem in ("demo", "search_1.5b_1gpu_grpo")]
    assert len(every) == 2
    return [(path, "") for path in CONFIGS] + [(p, v) for p in every for v in variants_of(p)]


@pytest.mark.parametrize(("path", "variant"), cases(), ids=lambda v: getattr(v, "stem", v))
def test_every_shipped_file_passes(path, variant, dry_run, monkeypatch):
    install(monkeypatch)
    flags = ["--variant", variant] if variant else []
    code, shown = dry_run("--config", str(path), *launcher_of(path), *flags)
    assert (code, "PROBLEM" in shown) == (0, False), shown
    if variant:
        assert f"variant {variant}:" in shown


GEM = ROOT / "scripts" / "configs" / "gem" / "games.yaml"
COMMANDS = [
    line.removeprefix("#   trl-stppo train ").split()
    for line in GEM.read_text().splitlines()
    if line.startswith("#   trl-stppo train ")
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[3] if words[3:] else "rebn")
def test_the_file_of_gem_switches_between_three_methods_by_the_lines_that_it_says(
    words, dry_run, monkeypatch
):
    install(monkeypatch)
    assert len(COMMANDS) == 3
    code, shown = dry_run(*words[:1], str(GEM), *words[2:])
    assert (code, "PROBLEM" in shown) == (0, False), shown
    method = words[3] if words[3:] else "rebn"
    assert f"variant {method}: token ratio" in shown
    assert ("critic separate" in shown) is (method == "ppo")
    assert "learning rates policy 1e-06" in shown
    assert "128 (" + ("16 prompts x 8" if method == "grpo" else "one per prompt") in shown


def test_the_file_of_gem_has_its_settings():
    config = yaml.safe_load(GEM.read_text())
    episodes = config["per_device_train_batch_size"] * config["gradient_accumulation_steps"]
    assert episodes == 128
    wanted = {"num_ppo_epochs": 2, "num_mini_batches": 1, "num_generations": 1, "gamma": 0.9}
    wanted |= {"learning_rate": 1e-6, "lr_scheduler_type": "constant", "temperature": 1.0}
    wanted |= {"beta": 0.0, "kl_coef": 0.0, "variant": "rebn"}
    assert {name: config[name] for name in wanted} == wanted
