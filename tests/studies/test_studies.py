"""The studies' drivers import, know their stages, and read what they have recorded."""

import gzip
import json

import pytest

from tests.kit.script_kit import ROOT

STUDIES = ROOT / "benchmarks" / "studies"
DRIVERS = sorted(path.stem for path in STUDIES.glob("*.py") if not path.stem.startswith("_"))


@pytest.mark.parametrize("name", DRIVERS)
def test_a_driver_imports_and_ends_in_json(name, script):
    if name == "plot_stability":
        pytest.importorskip("matplotlib")
    assert callable(script(name).main)
    text = (STUDIES / f"{name}.py").read_text()
    assert name == "plot_stability" or "finish(" in text.rpartition("def main(")[2]


@pytest.mark.parametrize("name", ["rivals", "practitioner", "relay"])
def test_the_recorded_runs_read_to_the_last_line(name, script):
    with gzip.open(STUDIES / f"{name}.jsonl.gz", "rt") as file:
        *_, last = file
    records = script("_rivals_stages").Records(STUDIES / f"{name}.jsonl.gz")
    assert tuple(json.loads(last)["key"]) in {tuple(key) for key in records.keys}


def test_levels_of_pressure_follow_from_the_recorded_pilots(script):
    stages = script("_rivals_stages")
    levels = stages.levels(stages.Records(STUDIES / "rivals.jsonl.gz"), "corridor")
    assert set(levels) >= {"none", "threshold", "extreme"}


def test_the_search_agent_has_recorded_weights_and_the_demos_tokenizer(script, tmp_path):
    tasks = script("_stability_tasks")
    tasks.build_agent("demo", tmp_path)
    agent = tasks.load_task("demo", tmp_path).agent
    weights = STUDIES / "assets" / "search-agent" / "model.safetensors"
    assert (agent / "model.safetensors").read_bytes() == weights.read_bytes()
    demo = ROOT / "scripts" / "assets" / "search-agent"
    assert (agent / "tokenizer.json").read_bytes() == (demo / "tokenizer.json").read_bytes()
    assert (demo / "model.safetensors").read_bytes() != weights.read_bytes()


def test_the_corridor_pays_for_seven_right_doors_alone(script):
    tasks = script("_stability_tasks")
    for wrong in (None, 6):
        env = tasks.CorridorEnv()
        env.reset(seed=3, colour="pink")
        for room in range(tasks.ROOMS):
            right = env.right_door
            door = next(d for d in tasks.DOORS if d != right) if room == wrong else right
            *_, reward, _, _, info = env.step(f"i seek pink {door}")
        assert reward == float(wrong is None) == float(info["success"])
