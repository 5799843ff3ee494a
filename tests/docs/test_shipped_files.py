"""A dry run passes for every shipped configuration, and for every command that its first lines give."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
import yaml

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
        for line in re.findall(
            r"^#   (?:trl-stppo|accelerate .+ -m trl_stppo) train (.+)", text, re.M
        )
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


def test_files_of_the_paper_differ_in_task_size_machine_and_method_alone():
    names = [
        *itertools.product(("search", "medical"), ("1.5b", "7b"), ("8gpu", "1gpu"), ("ppo", "grpo"))
    ]
    assert sorted(map("_".join, names)) == [path.stem for path in sorted(PAPER.glob("*.yaml"))]
    table = (PAPER / "README.md").read_text()
    for task, size, machine, method in names:
        path = PAPER / f"{task}_{size}_{machine}_{method}.yaml"
        config = yaml.safe_load(path.read_text())
        rows = config["per_device_train_batch_size"] * (8 if machine == "8gpu" else 1)
        episodes = rows * config["gradient_accumulation_steps"]
        assert episodes == 512 * (5 if method == "grpo" else 1) == 256 * config["num_mini_batches"]
        wanted = {"total_episodes": 1005 * episodes, "num_ppo_epochs": 1, "max_grad_norm": 1.0}
        wanted |= {"max_turns": 4, "max_turn_tokens": 500, "temperature": 1.0, "cliprange": None}
        wanted |= {"dataset_name": f"data/{task}", "output_dir": f"runs/paper/{path.stem}"}
        wanted |= {"model_name_or_path": f"Qwen/Qwen2.5-{size.upper()}-Instruct"}
        wanted |= {
            "ppo": {"cliprange_value": 0.5, "kl_coef": 0.001, "gamma": 1.0, "lam": 1.0},
            "grpo": {"beta": 0.001, "num_generations": 5},
        }[method]
        wanted |= {"learning_rate": 1e-6} if machine == "8gpu" else {"use_peft": True}
        assert {key: config.get(key) for key in wanted} == wanted, path
        launched = re.search(r"--config_file (\S+)", path.read_text())
        assert launched is None or (ROOT / launched[1]).is_file()
        how = f"`{Path(launched[1]).name}`" if launched else "one process"
        assert task == "medical" or f"| `{path.name}` | {how} |" in table


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


def test_files_for_one_gpu_fit_and_the_docs_say_how_well(script, capsys):
    script("memory").show_files()
    lines = capsys.readouterr().out.splitlines()
    files = sorted((SCRIPTS / "configs").glob("single_gpu*.yaml"))
    cards = [int(re.search(r"(\d+)gb", path.stem)[1]) for path in files]
    assert cards == [16, 24, 48, 80]
    assert {*lines} <= {*(ROOT / "docs" / "one_gpu.md").read_text().splitlines()}
    for card, line in zip(cards, lines, strict=True):
        assert float(re.search(r"([\d.]+) GiB", line)[1]) <= 0.92 * card


@pytest.mark.slow
def test_the_docs_say_what_fits(script, capsys):
    script("memory").show_fits()
    lines = (ROOT / "docs" / "one_gpu.md").read_text().splitlines()
    assert {*capsys.readouterr().out.splitlines()} <= {*lines}
