"""A file that was written for `trl grpo` trains as it is: rewards by name, mixtures, no environment."""

import inspect
import json
import re
from pathlib import Path

import pytest
import trl.scripts.grpo
import yaml
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

from tests.kit.script_kit import AGENT
from trl_stppo.cli import objects
from trl_stppo.cli.main import main

HERE = __name__


def long_answers(completions, **columns):
    return [float(len(str(completion))) for completion in completions]


def write_rows(folder: Path, split: str, count: int = 8, **columns: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"prompt": [{"role": "user", "content": f"say {folder.name} {i}"}], **columns} for i in range(count)
    ]
    (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def file(tmp_path):
    """Writes settings, as in TRL's own examples; gives the path."""
    write_rows(tmp_path / "a", "train")
    write_rows(tmp_path / "b", "train", 4)

    def write(**settings: object) -> str:
        settings = {
            "model_name_or_path": AGENT,
            "output_dir": str(tmp_path / "run"),
            "learning_rate": "1e-5",
            "per_device_train_batch_size": 4,
            "num_generations": 2,
            "max_completion_length": 8,
            "max_steps": 2,
            "logging_steps": 1,
            "use_cpu": True,
            "bf16": False,
            "report_to": "none",
            **settings,
        }
        path = tmp_path / "grpo.yaml"
        path.write_text(yaml.safe_dump({k: v for k, v in settings.items() if v is not None}))
        return str(path)

    return write


def history(tmp_path: Path) -> list[dict[str, float]]:
    return json.loads((tmp_path / "run" / "trainer_state.json").read_text())["log_history"]


@pytest.mark.long
@pytest.mark.parametrize("variant", [(), ("--variant", "grpo")])
def test_such_a_file_trains(variant, file, tmp_path):
    path = file(dataset_name=str(tmp_path / "a"), reward_funcs=["think_format_reward"])
    assert main(["train", "--config", path, *variant]) == 0
    log = [entry for entry in history(tmp_path) if "reward" in entry]
    assert "rewards/think_format_reward/mean" in log[-1]
    assert json.loads((tmp_path / "run" / "trainer_state.json").read_text())["global_step"] == 2
    assert main(["evaluate", "--config", path]) == 2, "there is no split to evaluate on"


@pytest.mark.long
def test_a_reward_model_comes_first_as_in_trl(file, tmp_path):
    config = AutoConfig.from_pretrained(AGENT, num_labels=1)
    AutoModelForSequenceClassification.from_config(config).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(AGENT).save_pretrained(tmp_path / "judge")
    path = file(
        dataset_name=str(tmp_path / "a"),
        reward_model_name_or_path=str(tmp_path / "judge"),
        reward_funcs=[f"{HERE}.long_answers"],
        reward_weights=[0.0, 2.0],
    )
    assert main(["train", "--config", path, "--dry_run"]) == 0
    assert main(["train", "--config", path]) == 0
    entry = next(entry for entry in history(tmp_path) if "reward" in entry)
    model, function = (entry[f"rewards/{name}/mean"] for name in ("judge", "long_answers"))
    assert model != 0.0
    assert entry["reward"] == pytest.approx(2.0 * function)


def test_the_registered_names_are_those_of_trls_script():
    script = inspect.getsource(trl.scripts.grpo)
    assert set(objects.TRL_REWARDS) == set(re.findall(r'^ {8}"(\w+)": ', script, re.MULTILINE))
    loaded = {name: objects.load_reward(name) for name in objects.TRL_REWARDS}
    assert loaded["think_format_reward"].__name__ == "think_format_reward"
    # A factory, which TRL's script has called: nothing is paid up to 1024 tokens, -1 from 1280 on.
    punished = loaded["get_soft_overlong_punishment"]
    assert punished(completion_ids=[[0] * 1000, [0] * 1300]) == [0.0, -1.0]


@pytest.mark.long
def test_evaluation_scores_by_them_under_names_that_read_well(file, tmp_path, caplog):
    write_rows(tmp_path / "a", "test", 2)
    path = file(
        dataset_name=str(tmp_path / "a"),
        reward_model_name_or_path="judge",
        reward_funcs=["think_format_reward", f"{HERE}.long_answers"],
        reward_weights=[1.0, 0.0, 2.0],
    )
    words = ["evaluate", "--config", path, "--output", str(tmp_path / "table.json")]
    assert main(words) == 0
    assert "`reward_model_name_or_path`: not" in caplog.text
    (figures,) = json.loads((tmp_path / "table.json").read_text())["results"].values()
    parts = figures["a"]
    assert parts["score"] == pytest.approx(2.0 * parts["long_answers"])
    assert "think_format_reward" in parts


@pytest.mark.long
def test_a_mixture_trains_and_its_split_is_played(file, tmp_path):
    parts = [{"path": str(tmp_path / name)} for name in "ab"]
    path = file(
        datasets=parts, test_split_size=4, eval_strategy="steps", eval_steps=2,
        reward_funcs=["think_format_reward"],
    )  # fmt: skip
    assert main(["train", "--config", path]) == 0
    assert any("eval_reward" in entry for entry in history(tmp_path))
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    assert first["settings"]["dataset"].split(",")[0] == "a+b"
