"""A dry run passes for every shipped configuration, and for every command that its first lines give."""

import re
import shlex
from pathlib import Path

import pytest

from tests.kit.dry_run_kit import processes_of
from tests.kit.fake_gem import install
from tests.kit.script_kit import AGENT, ROOT, SCRIPTS, scripts, small_data
from trl_stppo.cli import train

with scripts():
    from adventures import GameKind, game_rows, make_games, write_rows

CONFIGS = sorted(SCRIPTS.rglob("*.yaml"))
PAPER = SCRIPTS / "configs" / "paper"
GUIDE, TINY = (SCRIPTS / "textworld" / f"{name}.yaml" for name in ("guide", "tiny"))
DENSE = ["--environment_kwargs", '{"reward": "dense"}']


def commands_of(path: Path) -> list[list[str]]:
    """The flags after `train --config FILE` of the commands in a file's first lines."""
    text = path.read_text().replace("\\\n#", "")
    words = [
        shlex.split(line)
        for line in re.findall(r"^#   (?:trl-stppo|accelerate .+ -m trl_stppo) train (.+)", text, re.M)
    ]
    found = [w[w.index("--config") + 1 :] for w in words]
    return [w[1:] for w in found if ROOT / w[0] == path] or [[]]


CASES = [(path, words) for path in CONFIGS for words in commands_of(path)]
CASES += [(GUIDE, [*words, *DENSE]) for words in commands_of(GUIDE)]


def name_of(value: object) -> str:
    return value.stem if isinstance(value, Path) else " ".join(map(str, value))


@pytest.fixture
def small_games(tmp_path, monkeypatch):
    """What a study prepares for tiny.yaml of the text adventures, seen from where the file is started."""
    pytest.importorskip("textworld.generator")
    made = tmp_path / "runs" / "studies"
    kind = GameKind(rooms=2, objects=3, quest_length=3, step_points=True, theme="basic")
    rows = 64 * game_rows(make_games(made / "games", kind, [0]))
    for split in ("train", "test"):
        write_rows(made / "textworld-rows" / f"{split}.jsonl", rows)
    (made / "textworld-agent-0").symlink_to(AGENT)
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(("path", "words"), CASES, ids=name_of)
def test_every_command_of_every_shipped_file_passes(path, words, dry_run, monkeypatch, request):
    install(monkeypatch)
    if path == TINY:
        request.getfixturevalue("small_games")
    monkeypatch.setenv("WORLD_SIZE", processes_of(path))
    code, shown = dry_run("--config", str(path), *words)
    assert (code, "PROBLEM" in shown) == (0, False), shown
    if "--variant" in words:
        assert f"variant {words[words.index('--variant') + 1]}:" in shown


SMALL = (
    "--use_cpu true --optim adamw_torch --per_device_train_batch_size 4 --max_completion_length 200 "
    "--max_turn_tokens 24 --generation_slots 16 --warmup_steps 0 --save_strategy no "
    "--gradient_accumulation_steps 5 --total_episodes 20 --num_mini_batches 1"
)


@pytest.mark.parametrize("name", ["search_1.5b_1gpu_ppo", "medical_1.5b_1gpu_grpo"])
def test_files_of_the_paper_train_on_small_stand_ins(name, tmp_path):
    choices = '{"retriever": "stdlib", "max_observation_tokens": 60}'
    words = ["--config", str(PAPER / f"{name}.yaml"), "--model_name_or_path", AGENT, *SMALL.split()]
    words += ["--dataset_name", small_data(tmp_path / "data"), "--environment_kwargs", choices]
    train.run([*words, "--output_dir", str(tmp_path / "run")])
    assert (tmp_path / "run" / "adapter_model.safetensors").is_file()
    assert (tmp_path / "run" / "critic").exists() is name.endswith("_ppo")
