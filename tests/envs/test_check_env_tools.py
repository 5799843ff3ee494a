"""Each check of tool environments finds its fault."""

import pytest
import transformers
from packaging.version import Version

from tests.kit.check_env_cases import LOOK, CleanAsyncTools, CleanTools, env_with
from trl_stppo.envs import check_env
from trl_stppo.errors import EnvironmentContractError

REFUSES_CLASSES = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"), reason="5.13 takes any class for an object"
)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.mark.parametrize("env", [CleanTools, CleanAsyncTools])
def test_clean_tool_environments_pass(env) -> None:
    assert check_env(env, actions=LOOK) == []
    assert check_env(env()) == []


def no_docstring(self, where: str) -> str: ...


def half_described(self, where: str, when: str) -> str:
    """Look.\n\nArgs:\n    where: the place."""


def odd_hint(self, where: pytest.Config) -> str:
    """Look.\n\nArgs:\n    where: the place."""


@pytest.mark.parametrize(("tool", "message"), [
    (no_docstring, r"Faulty\.look` cannot be described .*docstring"),
    (half_described, "'when'"),
    pytest.param(odd_hint, "cannot be described to the model", marks=REFUSES_CLASSES),
])  # fmt: skip
def test_faulty_tools(tool, message) -> None:
    with pytest.raises(EnvironmentContractError, match=message):
        check_env(env_with(CleanTools, look=tool))


@pytest.mark.parametrize(("methods", "message"), [
    ({"reset": lambda self, **row: {"x": 1}}, r"reset returned \{'x': 1\}"),
    ({"reset": lambda self: None}, r"reset\(.*raised TypeError"),
    ({"get_reward": lambda self: "1"}, "get_reward returned '1'"),
    ({"get_reward": lambda self, x: 1.0}, r"get_reward\(\) raised TypeError"),
    ({"reset": lambda self, **row: None}, "reset does not empty turn_rewards"),
])  # fmt: skip
def test_faulty_tool_environments(methods, message) -> None:
    with pytest.raises(EnvironmentContractError, match=message):
        check_env(env_with(CleanTools, **methods), actions=LOOK)


def test_a_shared_list_of_rewards_is_found() -> None:
    shared: list[float] = []

    def start(self, **row):
        shared.clear()
        self.turn_rewards = shared

    faulty = env_with(CleanTools, __init__=start, reset=start)
    with pytest.raises(EnvironmentContractError, match="share one list turn_rewards"):
        check_env(faulty)
