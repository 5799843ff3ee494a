"""The names a user imports."""

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import trl_stppo
from trl_stppo.trainer._trl import GRPOConfig, GRPOTrainer

TRAINERS = [f"{kind}{part}" for kind in ("PPO", "STGRPO", "STPPO") for part in ("Config", "Trainer")]
NAMES = ["Agent", *TRAINERS, "isolated"]
ROOT = Path(__file__).parents[1]
LISTED = ROOT / "tests" / "fixtures" / "public_api.txt"


def public_names() -> Iterator[str]:
    """What the pages of the API describe."""
    for page in (ROOT / "docs" / "api").glob("*.md"):
        for kind, path in re.findall(r"^\.\. auto(module|class|function):: ([\w.]+)", page.read_text(), re.M):
            if kind != "module":
                yield path
                continue
            module = importlib.import_module(path)
            own = [n for n, thing in vars(module).items() if getattr(thing, "__module__", "") == path]
            names = getattr(module, "__all__", [name for name in own if not name.startswith("_")])
            yield from (f"{path}.{name}" for name in names)


def test_no_public_name_comes_or_goes_unnoticed():
    """One that goes has to answer, with a warning, until the next minor release (docs/api/index.md)."""
    assert sorted(set(public_names())) == LISTED.read_text().split()


def test_public_names_are_exactly_these():
    assert sorted(trl_stppo.__all__) == sorted([*NAMES, "__version__"])
    assert dir(trl_stppo) == sorted(trl_stppo.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_public_names_load_on_first_use(name):
    thing = getattr(trl_stppo, name)
    assert thing.__name__ == name
    assert inspect.getdoc(thing)


def test_positional_arguments_are_those_of_grpo_trainer_in_its_order():
    ours = [
        p.name
        for p in inspect.signature(trl_stppo.PPOTrainer.__init__).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert ours == list(inspect.signature(GRPOTrainer.__init__).parameters)


def test_options_of_our_own_stay_few():
    upstream = {spec.name for spec in fields(GRPOConfig)}
    kinds = trl_stppo.STPPOConfig, trl_stppo.STGRPOConfig
    own = {spec.name for kind in kinds for spec in fields(kind)} - upstream
    assert len(own) <= 38, "before a new one another has to go"
