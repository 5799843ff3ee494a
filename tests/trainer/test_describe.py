"""The one description of a run, built of its parts."""

from functools import partial

from datasets import Dataset

from tests.kit.builders import quick_config
from tests.kit.fakes import CountEnv
from trl_stppo import STPPOTrainer
from trl_stppo.trainer.describe import description_of
from trl_stppo.trainer.planning.plan import plan_rollout


class Adder:
    """Adds numbers.

    Slowly.
    """

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


def described(folder, factory, tools=None, rows=None):
    args = quick_config(folder, STPPOTrainer.config_class)
    models = {"model": "runs/a/checkpoint-100", "dtype": "float32", "critic": "none"}
    models |= {"adapter": None, "quantization": None}
    plan = plan_rollout(args, factory, None, tools)
    return description_of(STPPOTrainer, args, plan, rows, **models)


def test_environments_and_tools_are_told_once_each(tmp_path):
    factory = partial(Adder, largest=7, api_key="sk-1")
    run = described(tmp_path, factory, tools=[lookup])
    (environment,) = run.environments
    assert environment.tools == (("add", "Add a number."),)
    assert (environment.kind, environment.about) == ("tools", "Adds numbers.")
    assert run.tools == (("lookup", "Look a word up."),)
    assert run.environment == "Adder(largest=7) + tools lookup"
    assert "sk-1" not in repr(run)


def test_a_secret_is_known_by_its_name_also_as_a_positional_argument(tmp_path):
    run = described(tmp_path, partial(Adder, 7, "sk-1"))
    assert run.environment == "Adder(7)"
    assert "sk-1" not in repr(run)


class Counting(CountEnv):
    def __init__(self, turns, count_tokens):
        super().__init__(turns)


def test_the_tokens_counter_that_a_command_binds_is_no_argument_to_tell(tmp_path):
    run = described(tmp_path, partial(Counting, turns=2, count_tokens=len))
    assert run.environment == "Counting(turns=2)"


def test_several_environments_have_names_and_rows_have_a_size(tmp_path):
    rows = Dataset.from_dict({"prompt": ["a", "b"]})
    run = described(tmp_path, {"a": CountEnv, "b": partial(CountEnv)}, rows=rows)
    assert [(each.name, each.importable) for each in run.environments] == [("a", True), ("b", True)]
    names = {"model": "a/checkpoint-100", "environment": "CountEnv + CountEnv", "dataset": "2 rows"}
    assert run.task == names
    assert described(tmp_path, CountEnv, rows=iter(rows)).task["dataset"] == "a stream"
    assert run.settings["bf16"] is False
