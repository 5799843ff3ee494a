"""Sessions with an OpenEnv server: the logic with a stand-in client, then a real server on loopback."""

import functools
import json
import sys
import threading
from types import SimpleNamespace

import pytest

from tests.kit.waiting import PATIENCE, wait_until
from trl_stppo.envs import check_env
from trl_stppo.envs.adapters import GemEnv, GymnasiumEnv, OpenEnvSession


class Client:
    """Counts up to 2."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.is_closed = False

    def reset(self, **options):
        self.calls.append(("reset", options))
        return SimpleNamespace(observation={"n": 0}, reward=None, done=False)

    def step(self, action):
        self.calls.append(("step", action))
        n = sum(call[0] == "step" for call in self.calls)
        return SimpleNamespace(observation={"n": n}, reward=None if n < 2 else 1, done=n == 2)

    def close(self):
        self.is_closed = True


class BothKinds(Client):
    def sync(self):
        self.blocking = Client()
        return self.blocking


def test_session_translates_both_ways_and_maps_none_to_no_reward() -> None:
    client = Client()
    env = OpenEnvSession(client, is_success=lambda result: result.reward == 1)
    assert env.reset(prompt="q", seed=3) == ('{"n": 0}', {})
    first = env.step('I do <action>{"move": 1}</action>')
    assert first == ('{"n": 1}', 0.0, False, False, {"valid_action": True})
    assert env.step("{}") == ('{"n": 2}', 1.0, True, False, {"valid_action": True, "success": True})
    assert client.calls == [("reset", {"seed": 3}), ("step", {"move": 1}), ("step", {})]
    env.close()
    assert client.is_closed


@pytest.mark.parametrize("text", ["", "[1]", '{"a": '])
def test_a_text_without_an_action_does_not_reach_the_server(text: str) -> None:
    client = Client()
    env = OpenEnvSession(client, invalid_reward=-0.1)
    env.reset()
    observation, *rest = env.step(text)
    assert "JSON object" in observation
    assert rest == [-0.1, False, False, {"valid_action": False}]
    assert [call[0] for call in client.calls] == ["reset"]


def test_the_blocking_side_of_a_client_is_used_where_it_has_one() -> None:
    client = BothKinds()
    env = OpenEnvSession(lambda: client)
    env.reset()
    env.step("{}")
    assert client.calls == []
    assert [call[0] for call in client.blocking.calls] == ["reset", "step"]


def test_the_user_says_what_actions_and_observations_look_like() -> None:
    client = Client()
    env = OpenEnvSession(client, to_action=str.upper, to_text=lambda observation: "seen")
    assert env.reset()[0] == "seen"
    env.step("go")
    assert client.calls[-1] == ("step", "GO")


@pytest.mark.parametrize(("extra", "start"), [
    ("gem", lambda: GemEnv("dice")),
    ("gymnasium", lambda: GymnasiumEnv("FrozenLake-v1")),
    ("openenv", lambda: OpenEnvSession("http://127.0.0.1:1").reset()),
])  # fmt: skip
def test_a_missing_package_names_the_extra(extra, start, monkeypatch) -> None:
    for name in (extra, f"{extra}.core"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"pip install 'trl-stppo\[{extra}\]'"):
        start()


def test_a_failure_of_the_server_is_not_taken_for_an_unreadable_action() -> None:
    client = Client()
    client.step = lambda action: (_ for _ in ()).throw(RuntimeError("Server error: disk full"))
    env = OpenEnvSession(client)
    env.reset()
    with pytest.raises(RuntimeError, match="disk full"):
        env.step("{}")


@pytest.fixture(scope="module")
def server():
    """The address of a counting environment."""
    pytest.importorskip("openenv.core")
    import uvicorn
    from openenv.core.env_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State

    class Add(Action):
        amount: int

    class Total(Observation):
        total: int = 0

    class Counter(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.total = 0

        def reset(self, seed=None, episode_id=None, **options):
            self.total = seed or 0
            return Total(total=self.total)

        def step(self, action, timeout_s=None, **options):
            self.total += action.amount
            return Total(total=self.total, reward=float(action.amount), done=self.total >= 10)

        @property
        def state(self):
            return State()

    app = create_fastapi_app(Counter, Add, Total, max_concurrent_envs=8)
    running = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    assert wait_until(lambda: running.started)
    port = running.servers[0].sockets[0].getsockname()[1]
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join(PATIENCE)


def test_an_episode_over_the_wire(server) -> None:
    env = OpenEnvSession(server)
    assert json.loads(env.reset(seed=4)[0])["total"] == 4
    observation, *rest = env.step('{"amount": 3}')
    assert json.loads(observation)["total"] == 7
    assert rest == [3.0, False, False, {"valid_action": True}]
    assert env.step("three")[4] == {"valid_action": False}
    refused = env.step('{"sum": 3}')
    assert "VALIDATION_ERROR" in refused[0]
    assert refused[1:] == (0.0, False, False, {"valid_action": False})
    assert env.step('{"amount": 3}')[1:4] == (3.0, True, False)
    assert json.loads(env.reset(seed=1)[0])["total"] == 1
    env.close()


def test_two_sessions_do_not_meet(server) -> None:
    one, other = OpenEnvSession(server), OpenEnvSession(server)
    one.reset(seed=1)
    other.reset(seed=5)
    other.step('{"amount": 1}')
    assert json.loads(one.step('{"amount": 1}')[0])["total"] == 2
    one.close()
    other.close()


def test_keeps_the_contract(server) -> None:
    factory = functools.partial(OpenEnvSession, server, is_success=bool)
    assert check_env(factory, actions=['{"amount": 3}', "what?"]) == []
