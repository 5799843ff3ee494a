"""What the tests of files made by 0.1.0 begin with, and whether this machine calculates as theirs did."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from tests.fixtures.v0_1_0 import recipe


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def base(tmp_path_factory) -> Path:
    """Folder with the base model and the index that all runs had."""
    return recipe.unpacked("base", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def same_arithmetic(base) -> bool:
    """Whether the canary that was noted with the fixtures sings the same here.

    It hashes torch's version and what a fixed piece of training makes of the base model. Other kernels
    round otherwise; then weights can only be close, and a sampled token may be another one.
    """
    noted = json.loads((recipe.HERE / "made.json").read_text())["canary"]
    return recipe.canary(base) == noted


def check_refusal(message: str) -> None:
    """A version that cannot go on must say in one sentence which one can."""
    assert f"trl-stppo {recipe.VERSION}" in message
    assert len(re.split(r"[.!?]\s+(?=[A-Z`])", message.strip())) == 1, message


@pytest.fixture(scope="session")
def refused():
    return check_refusal
