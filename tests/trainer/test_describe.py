"""The one description of a run, built of its parts."""

from functools import partial
from types import SimpleNamespace

import pytest
from datasets import Dataset

from tests.kit.builders import quick_config
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy
from trl_stppo import STPPOTrainer
from trl_stppo.trainer.describe import describe
from trl_stppo.trainer.planning.plan import plan_rollout


class Adder:
    """Adds numbers."""

    def __init__(self, largest=3, api_key=""):
        self.total = 0

    def reset(self, **row) -> str:
        return "hi"

    def add(self, amount: int) -> str:
        """Add a number.\n\nArgs:\n    amount: what to add."""
        return str(amount)


def lookup(word: str) -> str:
    """Look a word up.\n\nArgs:\n    word: any."""
    return word


@pytest.fixture
def described(tmp_path):
    model = tiny_policy(char_tokenizer())
    model.config._name_or_path = "runs/a/checkpoint-100"

    def of(factory, tools=None, rows=None):
        host = SimpleNamespace(
            args=quick_config(tmp_path, STPPOTrainer.config_class), train_dataset=rows, model=model,
            accelerator=SimpleNamespace(unwrap_model=lambda m: m), has_critic=False, critic=None,
        )  # fmt: skip
        return describe(host, plan_rollout(host.args, factory, None, tools))

    return of


def test_environments_and_tools_are_named_once_each(described):
    run = described(partial(Adder, largest=7, api_key="sk-1"), tools=[lookup])
    (environment,) = run.environments
    assert (environment["kind"], environment["class"]) == ("tools", "Adder")
    assert environment["import"] == f"{__name__}:Adder"
    assert run.tools == ["lookup"]
    assert run.task["environment"] == "Adder(largest=7) + tools lookup"
    assert "sk-1" not in repr(run)


def test_a_secret_is_known_by_its_name_also_as_a_positional_argument(described):
    run = described(partial(Adder, 7, "sk-1"))
    assert run.task["environment"] == "Adder(7)"
    assert "sk-1" not in repr(run)


class Counting(CountEnv):
    def __init__(self, turns, count_tokens):
        super().__init__(turns)


def test_the_tokens_counter_that_a_command_binds_is_no_argument_to_show(described):
    run = described(partial(Counting, turns=2, count_tokens=len))
    assert run.task["environment"] == "Counting(turns=2)"


def test_several_environments_have_names_and_rows_have_a_size(described):
    rows = Dataset.from_dict({"prompt": ["a", "b"]})
    run = described({"a": CountEnv, "b": partial(CountEnv)}, rows=rows)
    assert [each["name"] for each in run.environments] == ["a", "b"]
    names = {"model": "a/checkpoint-100", "environment": "CountEnv + CountEnv", "dataset": "2 rows"}
    assert run.task == names
    assert described(CountEnv, rows=iter(rows)).task["dataset"] == "a stream"
    assert run.settings["bf16"] is False
