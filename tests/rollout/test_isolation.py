"""Environments in processes: what a tool does there, the trainer survives and cleans up after."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.kit.isolation_kit import (
    BuildsItsMessage,
    Env,
    TwoArguments,
    descendants,
    is_running,
)
from tests.kit.waiting import PATIENCE, wait_until
from trl_stppo.rollout import isolation
from trl_stppo.rollout.isolation import EnvironmentDied, IsolatedEnvironment

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")


@pytest.fixture
def env(monkeypatch):
    monkeypatch.setattr(isolation, "REAP_TIMEOUT", PATIENCE)
    one = IsolatedEnvironment(Env)
    yield one
    one.kill()


def test_methods_run_in_the_child(env):
    assert env.reset(prompt="p", n=1) == ('{"prompt": "p", "n": 1}', {})
    assert env.step("go") == ("GO", 0.5, False, False, {"valid_action": True})
    assert env.call("step", action="x")[0] == "X"
    assert env.pid != os.getpid()
    assert not env.torch_is_loaded()


def test_attributes_are_copies_of_the_current_value(env):
    assert env.turn_rewards == []
    env.step("a")
    env.step("b")
    assert env.turn_rewards == [0.5, 0.5]
    assert getattr(env, "absent", 7) == 7
    assert getattr(env, "absent", 8) == 8
    with pytest.raises(AttributeError, match="'Env' object has no attribute 'absent'"):
        _ = env.absent
    with pytest.raises(ValueError, match="property"):
        _ = env.broken


def test_callables_play_in_the_child_and_cached_properties_are_values(env):
    assert env.bound() == env.place() == env.pid
    assert env.table == {"a": 1}


def test_names_and_dunder_names(env):
    assert env.env_type_name == "Env"
    assert {"reset", "step", "search", "raises", "bound"} <= env.methods
    assert not {"table", "name", "broken", "Nested", "turn_rewards", "__init__"} & env.methods
    for name in ("__len__", "__array__", "__wrapped__"):
        assert not hasattr(env, name)


@pytest.mark.long
def test_lambdas_closures_and_local_classes():
    name = "from the closure"

    class Base:
        def greet(self):
            return "hello"

    class Local(Base):
        def greet(self):
            return f"{super().greet()} {name} {json.dumps([1])}"

        async def wait(self):
            await asyncio.sleep(0)
            return "waited"

    def closure():
        return Env(name)

    for factory, expected in ((lambda: Env("of a lambda"), "of a lambda"), (closure, name)):
        env = IsolatedEnvironment(factory)
        assert (env.env_type_name, env.name) == ("Env", expected)
        env.kill()
    env = IsolatedEnvironment(Local)
    assert env.greet() == "hello from the closure [1]"
    assert env.wait() == "waited"
    env.kill()


def test_what_main_defines_goes_by_value(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "print('main runs')\n"
        "from trl_stppo.rollout.isolation import IsolatedEnvironment\n"
        "def double(x):\n    return 2 * x\n"
        "class Broken(Exception):\n    pass\n"
        "class Mine:\n"
        "    def step(self, x):\n        return double(x)\n"
        "    def fail(self):\n        raise Broken('of main')\n"
        "env = IsolatedEnvironment(Mine)\n"
        "print(env.env_type_name, env.step(21))\n"
        "try:\n    env.fail()\nexcept RuntimeError as error:\n    print(error)\n"
    )
    command = [sys.executable, script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    expected = ["main runs", "Mine 42", "Broken: of main"]
    assert (result.stdout.splitlines(), result.stderr) == (expected, "")


def test_modules_found_since_the_server_started(monkeypatch, tmp_path, env):
    (tmp_path / "isolation_late.py").write_text("class Late:\n    def step(self): return 'late'\n")
    monkeypatch.syspath_prepend(tmp_path)
    import isolation_late

    late = IsolatedEnvironment(isolation_late.Late)
    assert late.step() == "late"
    late.kill()


def test_an_async_factory_is_awaited():
    async def make():
        return Env("awaited")

    env = IsolatedEnvironment(make)
    assert env.name == "awaited"
    env.kill()


def test_a_factory_that_cannot_travel():
    generator = (i for i in range(3))
    with pytest.raises(TypeError, match=r"factory `.*<lambda>` cannot be sent to another process"):
        IsolatedEnvironment(lambda: generator)


@pytest.mark.parametrize(("factory", "error", "message"), [
    (lambda: {}["missing index"], KeyError, "missing index"),
    (lambda: sys.exit(5), RuntimeError, "SystemExit: 5"),
    (lambda: os._exit(6), EnvironmentDied, "exit code 6"),
])  # fmt: skip
def test_a_factory_that_fails(factory, error, message):
    with pytest.raises(error, match=message):
        IsolatedEnvironment(factory)


def test_a_factory_that_hangs():
    before = descendants()
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"after 0\.3 s"):
        IsolatedEnvironment(lambda: time.sleep(1000), start_timeout=0.3)
    assert time.monotonic() - started < PATIENCE
    assert wait_until(lambda: descendants() <= before)


def test_exceptions_keep_type_message_and_traceback(env):
    with pytest.raises(KeyError, match="gone") as caught:
        env.raises(KeyError, "gone")
    assert "in raises" in "".join(caught.value.__notes__)
    with pytest.raises(TimeoutError, match="of the tool"):
        env.raises(TimeoutError, "of the tool")
    assert env.step("a")[0] == "A"


def test_what_cannot_travel_is_reported_as_text(env):
    for method, args, message in (
        ("raises", (TwoArguments, 3, "why"), "TwoArguments: why (3)"),
        ("raises", (BuildsItsMessage, 3), "BuildsItsMessage: code 3"),
        ("raises_local", (), "LocalError: here only"),
        ("raises_loaded", (), "ValueError: carries a lock"),
        ("raises", (SystemExit, 3), "SystemExit: 3"),
        ("leave", (), "SystemExit: 4"),
        ("interrupts", (), "KeyboardInterrupt: "),
    ):
        with pytest.raises(RuntimeError) as caught:
            env.call(method, *args)
        assert (type(caught.value), str(caught.value)) == (RuntimeError, message)
        assert env.step("a")[0] == "A"
        assert env.search("b") == "b True"


def test_results_and_arguments_that_cannot_travel(env):
    with pytest.raises(TypeError, match=r"a lock cannot be sent"):
        env.lock()
    with pytest.raises(TypeError, match=r"a Local cannot be sent"):
        env.local()
    with pytest.raises(TypeError, match=r"argument of `step` cannot be sent"):
        env.step(i for i in range(3))
    assert env.step("a")[0] == "A"


@pytest.mark.parametrize(("method", "argument", "message"), [
    ("exits", 3, "Env .* ended in or before `exits`: exit code 3"),
    ("signals", signal.SIGKILL, "signal 9"),
    ("signals", signal.SIGSEGV, r"signal 11 \(Segmentation fault\)"),
])  # fmt: skip
def test_a_child_that_dies_names_its_end(env, method, argument, message):
    with pytest.raises(EnvironmentDied, match=message):
        env.call(method, argument)
    assert not is_running(env.pid)
    with pytest.raises(EnvironmentDied, match="`step`"):
        env.step("a")
    with pytest.raises(EnvironmentDied):
        _ = env.name


def test_ctrl_c_belongs_to_the_trainer(env):
    assert env.signals(signal.SIGINT) == "still here"
    guard = env._process
    os.kill(guard.pid, signal.SIGINT)
    assert env.step("a")[0] == "A"
    assert guard.poll() is None
    assert os.getsid(env.pid) == env.pid


def test_a_guard_that_dies_takes_its_child_along(env):
    env._process.kill()
    with pytest.raises(EnvironmentDied, match="signal 9"):
        env.hangs()
    assert wait_until(lambda: not is_running(env.pid))
