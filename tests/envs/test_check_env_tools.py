"""Each check of tool environments finds its fault."""

import pytest
import transformers
from packaging.version import Version

from tests.kit.check_env_cases import LOOK, CleanAsyncTools, CleanTools, env_with, smell
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
    (no_docstring, r"Faulty\.look cannot be described .*docstring"),
    (half_described, "'when'"),
    pytest.param(odd_hint, "cannot be described to the model", marks=REFUSES_CLASSES),
])  # fmt: skip
def test_faulty_tools(tool, message) -> None:
    with pytest.raises(EnvironmentContractError, match=message):
        check_env(env_with(CleanTools, look=tool))


def test_an_environment_without_tools_says_so() -> None:
    faulty = type("Faulty", (), {"reset": CleanTools.reset, "_look": CleanTools.look})
    with pytest.raises(EnvironmentContractError, match="neither `step` nor a tool"):
        check_env(faulty)


@pytest.mark.parametrize(("methods", "message"), [
    ({"reset": lambda self, **row: ("x", {})}, r"reset returned \('x', \{\}\)"),
    ({"reset": lambda self: None}, r"reset\(.*raised TypeError"),
    ({"get_reward": lambda self: "1"}, "get_reward returned '1'"),
    ({"get_reward": lambda self, x: 1.0}, r"get_reward\(\) raised TypeError"),
    ({"reset": lambda self, **row: None}, "reset does not empty turn_rewards"),
])  # fmt: skip
def test_faulty_tool_environments(methods, message) -> None:
    with pytest.raises(EnvironmentContractError, match=message):
        check_env(env_with(CleanTools, **methods), actions=LOOK)


def test_rewards_of_turns_are_a_list() -> None:
    def look(self, where: str) -> str:
        """Look.\n\nArgs:\n    where: the place."""
        return where

    methods = {"__init__": lambda self: None, "reset": lambda self, **row: None, "look": look}
    faulty = env_with(CleanTools, turn_rewards=0.0, get_reward=lambda self: 0.0, **methods)
    with pytest.raises(EnvironmentContractError, match=r"turn_rewards is 0\.0"):
        check_env(faulty)


def test_rewards_of_tools_are_numbers() -> None:
    def look(self, where: str) -> str:
        """Look.\n\nArgs:\n    where: the place."""
        self.turn_rewards.append("1")
        return where

    faulty = env_with(CleanTools, look=look, get_reward=lambda self: 0.0)
    with pytest.raises(EnvironmentContractError, match="turn_rewards holds '1'"):
        check_env(faulty, actions=LOOK)


def test_a_shared_list_of_rewards_is_found() -> None:
    shared: list[float] = []

    def start(self, **row):
        shared.clear()
        self.turn_rewards = shared

    faulty = env_with(CleanTools, __init__=start, reset=start)
    with pytest.raises(EnvironmentContractError, match="share one list turn_rewards"):
        check_env(faulty)


def test_an_opening_that_the_other_instances_tools_change_is_found() -> None:
    seen: dict[str, str] = {}

    def reset(self, **row):
        CleanTools.reset(self)
        seen.setdefault("first", id(self))
        return str([who for who in seen.values() if who != id(self)])

    def look(self, where: str) -> str:
        """Look.\n\nArgs:\n    where: the place."""
        seen["last"] = id(self)
        return where

    with pytest.raises(EnvironmentContractError, match="Two instances of"):
        check_env(env_with(CleanTools, reset=reset, look=look), actions=LOOK)


def test_smells_of_tools() -> None:
    def look(self, where: str):
        """Look.\n\nArgs:\n    where: the place."""
        if where == "nowhere":
            raise LookupError(where)
        return 3

    env = env_with(CleanTools, look=look)()
    found = check_env(env, actions=[*LOOK, ("look", {"where": "nowhere"})])
    assert any("look returned 3" in message for message in found)
    assert any("LookupError: nowhere" in message for message in found)


def test_another_opening_of_a_tool_environment_is_a_smell() -> None:
    def reset(self, **row):
        CleanTools.reset(self)
        self.count = getattr(self, "count", 0) + 1
        return str(self.count)

    assert "reset returns another text" in smell(env_with(CleanTools, reset=reset)())


def test_a_tool_called_step_is_a_tool() -> None:
    def step(self, where: str) -> str:
        """Go.\n\nArgs:\n    where: the place."""
        return where

    assert check_env(env_with(CleanTools, step=step)()) == []


def test_unknown_tools_in_actions_are_refused() -> None:
    with pytest.raises(ValueError, match="actions"):
        check_env(CleanTools, actions=[("sing", {})])
