"""`trl-stppo train --dry_run` passes every configuration in scripts/."""

import shlex
from pathlib import Path

import pytest

from tests.kit.dry_run_kit import processes_of
from tests.kit.fake_gem import install
from tests.kit.script_kit import AGENT, ROOT, SCRIPTS, scripts
from trl_stppo.trainer.stgrpo_config import GROUP_VARIANTS
from trl_stppo.trainer.stppo_config import VARIANTS

with scripts():
    from adventures import GameKind, game_rows, make_games, write_rows

CONFIGS = sorted(SCRIPTS.rglob("*.yaml"))


def variants_of(path: Path) -> list[str]:
    return list(GROUP_VARIANTS if path.stem.endswith("_grpo") else VARIANTS)


def cases() -> list[tuple[Path, str]]:
    """Each file as it is, and all variants of one with a critic and one without."""
    every = [path for path in CONFIGS if path.stem in ("demo", "search_1.5b_1gpu_grpo")]
    assert len(every) == 2
    return [(path, "") for path in CONFIGS] + [(p, v) for p in every for v in variants_of(p)]


@pytest.fixture
def small_games(tmp_path, monkeypatch):
    """What a benchmark makes for tiny.yaml of the text adventures, seen from where the file is started."""
    pytest.importorskip("textworld.generator")
    made = tmp_path / "runs" / "studies"
    kind = GameKind(rooms=2, objects=3, quest_length=3, step_points=True, theme="basic")
    rows = 64 * game_rows(make_games(made / "games", kind, [0]))
    for split in ("train", "test"):
        write_rows(made / "textworld-rows" / f"{split}.jsonl", rows)
    (made / "textworld-agent-0").symlink_to(AGENT)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("path", "variant"), cases(), ids=lambda v: getattr(v, "stem", v))
def test_every_shipped_file_passes(path, variant, dry_run, monkeypatch, request):
    install(monkeypatch)
    if path == TINY:
        request.getfixturevalue("small_games")
    flags = ["--variant", variant] if variant else []
    monkeypatch.setenv("WORLD_SIZE", processes_of(path))
    code, shown = dry_run("--config", str(path), *flags)
    assert (code, "PROBLEM" in shown) == (0, False), shown
    if variant:
        assert f"variant {variant}:" in shown


GEM = SCRIPTS / "configs" / "gem" / "games.yaml"
METHODS = ("st-ppo", "grpo", "rloo", "rebn")
GUIDE, TINY = (SCRIPTS / "textworld" / f"{name}.yaml" for name in ("guide", "tiny"))


def commands_of(path: Path) -> list[list[str]]:
    """The words behind `train --config FILE` of the commands in a file's first lines."""
    lines = [line.removeprefix("#   trl-stppo train ") for line in path.read_text().splitlines()]
    commands = [shlex.split(line) for line in lines if line.startswith("--config ")]
    for words in commands:
        assert ROOT / words[1] == path
    return [words[2:] for words in commands]


@pytest.mark.parametrize("words", commands_of(GEM), ids=lambda words: words[1] if words else "rebn")
def test_the_file_of_gem_switches_between_three_methods_by_the_lines_that_it_says(
    words, dry_run, monkeypatch
):
    install(monkeypatch)
    assert len(commands_of(GEM)) == 3
    code, shown = dry_run("--config", str(GEM), *words)
    assert (code, "PROBLEM" in shown) == (0, False), shown
    method = words[1] if words else "rebn"
    assert f"variant {method}: token ratio" in shown
    assert ("critic separate" in shown) is (method == "ppo")
    assert "learning rate 1e-06" in shown
    assert "128 episodes (" + ("16 prompts x 8" if method == "grpo" else "one per prompt") in shown


@pytest.mark.parametrize("reward", ["sparse", "dense"])
@pytest.mark.parametrize(
    "words", commands_of(GUIDE), ids=lambda words: words[1] if words else "ppo"
)
def test_the_file_of_the_guide_switches_methods_and_rewards_by_the_lines_that_it_says(
    words, reward, dry_run
):
    (dense,) = (
        shlex.split(line.lstrip("# "))
        for line in GUIDE.read_text().splitlines()
        if line.startswith("#   --environment_kwargs")
    )
    flags = dense if reward == "dense" else []
    code, shown = dry_run("--config", str(GUIDE), *words, *flags)
    assert (code, "PROBLEM" in shown) == (0, False), shown
    method = words[1] if words else "ppo"
    assert [words[1:2] for words in commands_of(GUIDE)] == [[], *([name] for name in METHODS)]
    assert f"variant {method}:" in shown
    assert f'"reward": "{reward}"' in shown
    assert ("separate, learning rate 1e-05" in shown) is ("ppo" in method)
    assert "256 episodes (" + ("32 prompts x 8" if method in ("grpo", "rloo") else "one") in shown


@pytest.mark.parametrize(
    "words", commands_of(TINY), ids=lambda words: " ".join(words) or "as it is"
)
def test_the_lines_of_the_small_file_of_the_guide_pass(words, dry_run, small_games):
    code, shown = dry_run("--config", str(TINY), *words)
    assert (code, "PROBLEM" in shown) == (0, False), shown
