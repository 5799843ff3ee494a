"""Short names of a run's model, environment and data."""

from functools import partial

import pytest
from datasets import Dataset

from tests.kit.builders import quick_config
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy
from trl_stppo import STPPOTrainer
from trl_stppo.trainer.describe import task
from trl_stppo.trainer.planning.plan import plan_rollout


class Adder:
    """Adds numbers."""

    def __init__(self, largest=3, note=""):
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
    """The short names of a run, by environment, tools and rows."""
    model = tiny_policy(char_tokenizer())
    model.config._name_or_path = "runs/a/checkpoint-100"

    def of(factory, tools=None, rows=None):
        args = quick_config(tmp_path, STPPOTrainer.config_class)
        return task(model, rows, plan_rollout(args, factory, None, tools))

    return of


def test_environments_and_tools_are_named_once_each(described):
    names = described(partial(Adder, 7, note="a text of several words"), tools=[lookup])
    assert names["environment"] == "Adder(7, note=#aec331) + tools lookup"


def test_several_environments_have_names_and_rows_have_a_size(described):
    rows = Dataset.from_dict({"prompt": ["a", "b"]})
    names = described({"a": CountEnv, "b": partial(CountEnv)}, rows=rows)
    expected = {"model": "a/checkpoint-100", "environment": "CountEnv + CountEnv"}
    assert names == expected | {"dataset": "2 rows"}
    assert described(CountEnv, rows=iter(rows))["dataset"] == "a stream"
