"""Closes what a test has built."""

import threading

import pytest

from tests.kit.rollout_kit import BUILT, EARLIER
from trl_stppo.rollout.workers import EnvironmentCalls


@pytest.fixture(autouse=True)
def _closed():
    EARLIER[:] = threading.enumerate()
    yield
    while BUILT:
        BUILT.pop().close()


@pytest.fixture
def calls():
    pool = EnvironmentCalls()
    yield pool
    pool.close()
