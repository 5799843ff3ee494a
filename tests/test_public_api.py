"""The names a user imports."""

from __future__ import annotations

import inspect

import pytest

import trl_stppo
from trl_stppo.trainer._trl import GRPOConfig, GRPOTrainer

TRAINERS = [
    f"{kind}{part}" for kind in ("PPO", "STGRPO", "STPPO") for part in ("Config", "Trainer")
]
NAMES = ["Agent", *TRAINERS]


def test_public_names_are_exactly_these():
    assert sorted(trl_stppo.__all__) == [*NAMES, "__version__"]
    assert dir(trl_stppo) == sorted(trl_stppo.__all__)


@pytest.mark.parametrize("name", NAMES)
def test_public_names_load_on_first_use(name):
    thing = getattr(trl_stppo, name)
    assert thing.__name__ == name
    assert inspect.getdoc(thing)


def test_version_is_a_release_number():
    assert trl_stppo.__version__ == trl_stppo.version.__version__
    assert all(part.isdigit() for part in trl_stppo.__version__.split(".")[:2])


def test_an_unknown_name_raises_attribute_error_naming_it():
    with pytest.raises(AttributeError, match=r"'trl_stppo' has no attribute 'GRPOTrainer'"):
        trl_stppo.GRPOTrainer  # noqa: B018


def test_an_unknown_name_cannot_be_imported():
    with pytest.raises(ImportError, match="TurnPPOTrainer"):
        from trl_stppo import TurnPPOTrainer  # noqa: F401


def test_trainers_and_configs_are_trls():
    assert issubclass(trl_stppo.STPPOTrainer, trl_stppo.PPOTrainer)
    assert issubclass(trl_stppo.PPOTrainer, GRPOTrainer)
    assert issubclass(trl_stppo.STPPOConfig, trl_stppo.PPOConfig)
    assert issubclass(trl_stppo.PPOConfig, GRPOConfig)


def test_positional_arguments_are_those_of_grpo_trainer_in_its_order():
    ours = [
        p.name
        for p in inspect.signature(trl_stppo.PPOTrainer.__init__).parameters.values()
        if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    assert ours == list(inspect.signature(GRPOTrainer.__init__).parameters)
