import re

import pytest

from scripts.search.search_env import retrieval
from scripts.search.search_env.env import StdlibSearchEnv
from scripts.search.search_env.retrieval import stdlib_search_dataset
from tests.kit.script_kit import scripts

with scripts() as _module:
    maker = _module("stdlib_questions")


def test_splits_are_large_and_share_no_asked_name() -> None:
    train, test = stdlib_search_dataset("train"), stdlib_search_dataset("test")
    assert len(train) >= 1000
    assert len(test) >= 400
    assert not {row["name"] for row in train} & {row["name"] for row in test}
    assert all(maker.is_held_out(row["name"]) for row in test)


def _oracle(row: dict, env: StdlibSearchEnv) -> float:
    """Search the asked name, then what the first passage says; answer from the last passage."""
    env.reset(**row)
    name = row["name"]
    for _ in range(row["hops"]):
        observation = env.step(f"<search>{name}</search>")[0]
        shown = observation.removeprefix("<information> ").split(" | ")[0]
        owner = re.search(r"of class (\S+)", shown)
        base = re.search(r"with base (\S+?)\.?( |$)", shown)
        name = owner[1] if owner else base[1] if base else ""
    module = re.search(r"in module (\S+?)\.?( |$)", shown)
    answer = {"module": module, "class": owner, "base": base}[row["kind"].rpartition("_")[2]]
    return env.step(f"<answer>{answer[1] if answer else '?'}</answer>")[1]


@pytest.mark.long
@pytest.mark.parametrize("split", ["train", "test"])
def test_searching_the_asked_name_leads_to_the_answer(split: retrieval.Split) -> None:
    pytest.importorskip("bm25s")
    rows = stdlib_search_dataset(split)
    env = StdlibSearchEnv()
    assert sum(_oracle(row, env) for row in rows) / len(rows) >= 0.97
