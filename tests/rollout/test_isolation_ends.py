"""Environments in processes: how they end, and that nothing of them stays."""

import gc
import os
import signal
import time

import pytest

from tests.kit.isolation_kit import (
    Env,
    descendants,
    descriptors,
    in_thread,
    is_running,
    run_script,
)
from tests.kit.waiting import PATIENCE, wait_until
from trl_stppo.rollout import isolation
from trl_stppo.rollout.isolation import EnvironmentDied, IsolatedEnvironment

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")


@pytest.fixture(autouse=True)
def _patient(monkeypatch):
    """On a busy machine too, `kill` and `close` return when the process is gone."""
    monkeypatch.setattr(isolation, "REAP_TIMEOUT", PATIENCE)
    monkeypatch.setattr(isolation, "CLOSE_TIMEOUT", PATIENCE)


@pytest.fixture
def env():
    one = IsolatedEnvironment(Env)
    yield one
    one.kill()


@pytest.mark.parametrize(("method", "args"), [("hangs", ()), ("sleeps", (1000,))])
def test_kill_ends_a_call_of_another_thread(env, method, args):
    result = in_thread(lambda: env.call(method, *args))
    time.sleep(0.2)
    started = time.monotonic()
    env.kill()
    assert isinstance(result(), EnvironmentDied)
    assert time.monotonic() - started < PATIENCE
    assert not is_running(env.pid)
    env.kill()
    env.close()


def test_kill_ends_the_subprocesses_of_a_tool(env):
    pid = env.spawns()
    assert is_running(pid)
    env.kill()
    assert wait_until(lambda: not is_running(pid))


def test_subprocesses_of_a_child_that_exits_end_with_it(env, tmp_path):
    with pytest.raises(EnvironmentDied, match="exit code 0"):
        env.spawns_and_exits(str(tmp_path / "pid"))
    pid = int((tmp_path / "pid").read_text())
    assert wait_until(lambda: not is_running(pid))


def test_one_call_at_a_time(env):
    results = [in_thread(lambda: env.overlaps(0.05)) for _ in range(4)]
    assert [result() for result in results] == [1, 1, 1, 1]


@pytest.mark.long
def test_close_calls_close_and_ends_the_child(tmp_path):
    mark = str(tmp_path / "closed")

    class Closing:
        async def close(self):
            open(mark, "w").close()

    env = IsolatedEnvironment(Closing)
    env.close()
    assert os.path.exists(mark)
    assert not is_running(env.pid)
    env.close()
    for other in (IsolatedEnvironment(Env), IsolatedEnvironment(dict)):
        other.close()
        assert not is_running(other.pid)


@pytest.mark.long
def test_close_is_bounded_and_passes_errors_on(monkeypatch):
    class Stuck:
        def close(self):
            time.sleep(1000)

    class Failing:
        def close(self):
            raise ValueError("not closed")

    stuck, busy, failing = (IsolatedEnvironment(make) for make in (Stuck, Env, Failing))
    call = in_thread(lambda: busy.sleeps(1000))
    with monkeypatch.context() as patch:
        patch.setattr(isolation, "CLOSE_TIMEOUT", 0.5)
        closing = [in_thread(stuck.close), in_thread(busy.close)]
        assert [done() for done in closing] == [None, None]
    assert isinstance(call(), EnvironmentDied)
    with pytest.raises(ValueError, match="not closed"):
        failing.close()
    assert not any(is_running(env.pid) for env in (stuck, busy, failing))


def test_an_interrupted_call_cannot_answer_the_next_one(env):
    class Interrupted(BaseException):
        pass

    def interrupt(*_):
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(Interrupted):
            env.interrupts_and_hangs(os.getpid())
    finally:
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(EnvironmentDied):
        env.step("a")


@pytest.mark.long
def test_cycles_leave_neither_descriptors_nor_children():
    def cycle(i):
        env = IsolatedEnvironment(Env)
        if i % 4 == 0:
            env.kill()
        elif i % 4 == 1:
            env.close()
        elif i % 4 == 2:
            with pytest.raises(EnvironmentDied):
                env.exits(1)
            return env
        return env if i % 4 < 2 else None

    cycle(0)
    gc.collect()
    before = descriptors(), descendants()
    kept = [cycle(i) for i in range(20)]
    assert wait_until(lambda: (descriptors(), descendants()) == before)
    del kept


def test_a_fork_of_the_caller_neither_kills_nor_keeps_the_child(env):
    released, releases = os.pipe()
    pid = os.fork()
    if not pid:
        isolation._release(*env._release.detach()[2])
        os.write(releases, b".")
        time.sleep(1000)
        os._exit(0)
    other = IsolatedEnvironment(Env)
    holder = os.fork()
    if not holder:
        time.sleep(1000)
        os._exit(0)
    try:
        assert os.read(released, 1) == b"."
        assert env.step("a")[0] == "A"
        result = in_thread(other.hangs)
        time.sleep(0.1)
        other.kill()
        assert isinstance(result(), EnvironmentDied)
        assert not is_running(other.pid)
    finally:
        for child in (pid, holder):
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(released)
        os.close(releases)


HANGING = """
class Env:
    def hangs(self):
        while True:
            pass
    def matches(self):
        import re
        re.match("(a+)+$", "a" * 60 + "b")  # never lets another Python thread run
envs = [IsolatedEnvironment(Env) for _ in range(2)]
def wait(env, method):
    try:
        env.call(method)
    except EnvironmentDied:
        pass
for env, method in zip(envs, ("hangs", "matches")):
    threading.Thread(target=wait, args=(env, method), daemon=True).start()
idle = IsolatedEnvironment(Env)
time.sleep(0.2)
print(*(e.pid for e in [*envs, idle]), idle._process.pid, flush=True)
"""


@pytest.mark.long
def test_a_hanging_child_does_not_block_the_exit_of_the_caller():
    process = run_script(HANGING)
    pids = process.stdout.readline()
    assert process.wait(PATIENCE) == 0
    assert not any(is_running(int(pid)) for pid in pids.split())
    assert process.communicate(timeout=PATIENCE) == ("", "")


# Linux kills the children with their guard, elsewhere the guard must do so.
ELSEWHERE = """
from trl_stppo.rollout import isolation
isolation._CODE = isolation._CODE.replace("isolation._guard", "sys.platform = 'other'; isolation._guard")
"""


@pytest.mark.long
@pytest.mark.parametrize(("number", "head"), [(signal.SIGKILL, ""), (signal.SIGTERM, ELSEWHERE)])
def test_no_child_outlives_a_killed_caller(number, head):
    process = run_script(head + HANGING + "time.sleep(1000)")
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 4
    assert all(is_running(pid) for pid in pids)
    process.send_signal(number)
    process.communicate(timeout=PATIENCE)
    assert process.returncode == -number
    assert wait_until(lambda: not any(is_running(pid) for pid in pids))


@pytest.mark.long
def test_no_child_outlives_a_killed_caller_whose_fork_lives_on():
    fork = "if not (pid := os.fork()):\n    time.sleep(1000)\nprint(pid, flush=True)\n"
    process = run_script(ELSEWHERE + HANGING + fork + "time.sleep(1000)")
    pids = [int(pid) for pid in process.stdout.readline().split()]
    holder = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        assert wait_until(lambda: not any(is_running(pid) for pid in pids))
    finally:
        os.kill(holder, signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


def test_output_of_the_child_passes_through_even_if_it_is_killed(tmp_path):
    process = run_script(
        "class Env:\n"
        "    def talk(self):\n"
        "        print('from the child')\n"
        f"        os.mkdir({str(tmp_path / 'printed')!r})\n"
        "        while True: pass\n"
        "env = IsolatedEnvironment(Env)\n"
        "threading.Thread(target=env.talk, daemon=True).start()\n"
        f"while not os.path.exists({str(tmp_path / 'printed')!r}): time.sleep(0.01)\n"
        "env.kill()\n",
        env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
    )
    assert process.communicate(timeout=PATIENCE)[0] == "from the child\n"
