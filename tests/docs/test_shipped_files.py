"""`trl-stppo train --dry_run` passes every file in scripts/configs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dry_run_kit import launcher_of
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
def test_every_shipped_file_passes(path, variant, dry_run):
    flags = ["--variant", variant] if variant else []
    code, shown = dry_run("--config", str(path), *launcher_of(path), *flags)
    assert (code, "PROBLEM" in shown) == (0, False), shown
    if variant:
        assert f"variant {variant}:" in shown
