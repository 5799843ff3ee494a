"""What an environment's class says of itself: its rows, and what an evaluation reports."""

from datasets import Dataset

from trl_stppo import isolated
from trl_stppo.cli import agents, evaluate, objects
from trl_stppo.cli.flags import EvaluateArguments
from trl_stppo.rollout.isolation import Isolated

HERE = __name__


def few(split: str) -> Dataset:
    return Dataset.from_list([{"prompt": f"{split} {number}"} for number in range(3)])


def shout(completions, **columns):
    return [1.0 for _ in completions]


class Offering:
    """With rows and figures of its own."""

    @classmethod
    def datasets(cls):
        return {"few": few, "none-of-it": None}

    @classmethod
    def figures(cls):
        return [shout]


APART = isolated(Offering)


class Silent:
    """Says nothing; a method of an instance is not meant."""

    def datasets(self):
        raise AssertionError


def arguments(environment: str | None, **others) -> EvaluateArguments:
    return EvaluateArguments(environment=environment, **others)


def test_an_isolated_factory_offers_its_classs_rows_and_takes_arguments():
    assert objects.offered_by(f"{HERE}:APART", "figures") == [shout]
    assert objects.factory_of(f"{HERE}:APART", None) == APART
    bound = objects.factory_of(f"{HERE}:APART", '{"size": 2}')
    assert isinstance(bound, Isolated)
    assert (bound.factory.func, bound.factory.keywords) == (Offering, {"size": 2})


def test_rows_are_the_environments_own_unless_others_are_named(tmp_path):
    for name in (None, "few"):
        args = arguments(f"{HERE}:Offering", dataset_name=name)
        train, held_out = agents.load_splits(args)
        assert (train[0]["prompt"], held_out[2]["prompt"]) == ("train 0", "test 2")
        assert args.dataset_name == "few", "tables and cards call it so"
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "mine"}\n')
    args = arguments(f"{HERE}:Offering", dataset_name=str(rows))
    assert agents.load_splits(args)[0][0] == {"prompt": "mine"}


def test_figures_are_the_environments_own_unless_they_are_in_the_score():
    def reported(*counting, environment):
        return evaluate.reported_functions(arguments(environment), counting)

    assert reported(environment=f"{HERE}:Offering") == [shout]
    assert reported(environment=f"{HERE}:Silent") == []
    counted = objects.load_reward(f"{HERE}:shout")
    assert reported(counted, environment=f"{HERE}:Offering") == []
