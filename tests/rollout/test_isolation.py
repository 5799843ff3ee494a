"""Environments in processes: what a tool does there, the trainer survives and cleans up after."""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trl_stppo.rollout import isolation_server
from trl_stppo.rollout.isolation import EnvironmentDied, IsolatedEnvironment

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs POSIX")
ROOT = Path(__file__).resolve().parents[2]


class TwoArguments(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{reason} ({code})")
        self.code = code


class BuildsItsMessage(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")


def at_home(kind, pid):
    if os.getpid() != pid:
        raise LookupError("far from home")
    return kind()


class HomeBound(ValueError):
    """Can be pickled, and loaded again, but only in its own process."""

    def __reduce__(self):
        return at_home, (type(self), os.getpid())


class Env:
    """Everything that a tool may do right or wrong."""

    def __init__(self, name="default"):
        self.name = name
        self.turn_rewards = []
        self.client_loop = None
        self.depth = 0

    def reset(self, **row):
        self.turn_rewards = []
        return json.dumps(row), {}

    def step(self, action):
        self.turn_rewards.append(0.5)
        return action.upper(), 0.5, False, False, {"valid_action": True}

    async def search(self, query):
        loop = asyncio.get_running_loop()
        same = self.client_loop in (None, loop)
        self.client_loop = loop
        await asyncio.sleep(0)
        return f"{query} {same}"

    async def leave(self):
        sys.exit(4)

    def raises(self, kind, *args):
        raise kind(*args)

    def raises_local(self):
        class LocalError(ValueError):
            pass

        raise LocalError("here only")

    def raises_loaded(self):
        error = ValueError("carries a lock")
        error.lock = threading.Lock()
        raise error

    def interrupts(self):
        raise KeyboardInterrupt

    def exits(self, code):
        os._exit(code)

    def signals(self, number):
        os.kill(os.getpid(), number)
        return "still here"

    def hangs(self):
        while True:
            pass

    def sleeps(self, seconds):
        time.sleep(seconds)
        return seconds

    def lock(self):
        return threading.Lock()

    def local(self):
        class Local:
            pass

        return Local()

    def overlaps(self, seconds):
        """Enter, wait, leave: more than one at a time would see each other."""
        self.depth += 1
        time.sleep(seconds)
        seen, self.depth = self.depth, self.depth - 1
        return seen

    def spawns(self):
        return subprocess.Popen(["sleep", "1000"]).pid

    def spawns_and_exits(self, mark):
        Path(mark).write_text(str(self.spawns()))
        os._exit(0)

    def home_bound(self):
        return HomeBound()

    def size(self, text):
        return len(text), text

    def where(self):
        return os.getcwd(), os.environ.get("ISOLATION_TEST")

    def torch_is_loaded(self):
        return "torch" in sys.modules

    def sockets(self):
        links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
        return sum(os.readlink(x).startswith("socket") for x in links if os.path.lexists(x))

    def __len__(self):
        return 3

    @property
    def broken(self):
        raise ValueError("property")

    class Nested:
        pass


@pytest.fixture
def env():
    one = IsolatedEnvironment(Env)
    yield one
    one.kill()


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    except FileNotFoundError:
        return False


def eventually(condition, seconds=5.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(condition())


def descriptors(pid="self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children_of(pid: int) -> set[int]:
    """Zombies included."""
    return {int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def in_thread(function):
    """Run it in a daemon thread; the returned function waits for its result or exception."""
    outcome = []

    def body():
        try:
            outcome.append(function())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()

    def result(timeout=5.0):
        thread.join(timeout)
        assert outcome, "the thread is still busy"
        return outcome[0]

    return result


def run_script(body: str, **kwargs):
    head = "import os, sys, time, threading\nfrom trl_stppo.rollout.isolation import *\n"
    return subprocess.Popen(
        [sys.executable, "-c", head + body],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **kwargs,
    )


# --- Used like the object -------------------------------------------------------------------------


def test_methods_run_in_the_child(env):
    assert env.reset(prompt="p", n=1) == ('{"prompt": "p", "n": 1}', {})
    assert env.step("go") == ("GO", 0.5, False, False, {"valid_action": True})
    assert env.call("step", action="x")[0] == "X"
    assert env.pid != os.getpid()
    assert env.alive
    assert not env.torch_is_loaded()


def test_attributes_are_copies_of_the_current_value(env):
    assert env.turn_rewards == []
    env.step("a")
    env.step("b")
    assert env.turn_rewards == [0.5, 0.5]
    assert env.get("turn_rewards") == [0.5, 0.5]
    assert env.get("absent") is None
    assert env.get("absent", 7) == 7
    assert getattr(env, "absent", 8) == 8
    with pytest.raises(AttributeError, match="'Env' object has no attribute 'absent'"):
        _ = env.absent
    with pytest.raises(ValueError, match="property"):
        _ = env.broken


def test_names_and_dunder_names(env):
    assert env.env_type_name == "Env"
    assert {"reset", "step", "search", "raises"} <= env.methods
    assert not {"name", "broken", "Nested", "turn_rewards", "__init__"} & env.methods
    for name in ("__len__", "__array__", "__wrapped__"):
        assert not hasattr(env, name)


def test_async_methods_share_one_loop(env):
    assert env.search("a") == "a True"
    assert env.search("b") == "b True"


def test_large_messages(env):
    text = "ä" * 1_000_000
    assert env.size(text) == (len(text), text)


def test_the_child_sees_the_folder_and_variables_of_its_start(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ISOLATION_TEST", "set later than the server")
    env = IsolatedEnvironment(Env)
    assert env.where() == (str(tmp_path), "set later than the server")
    env.kill()


# --- Factories ------------------------------------------------------------------------------------


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
    result = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=20)
    expected = ["main runs", "Mine 42", "Broken: of main"]  # once: no child ran the script again
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


@pytest.mark.parametrize(
    ("factory", "error", "message"),
    [
        (lambda: {}["missing index"], KeyError, "missing index"),
        (lambda: sys.exit(5), RuntimeError, "SystemExit: 5"),
        (lambda: os._exit(6), EnvironmentDied, "exit code 6"),
    ],
)
def test_a_factory_that_fails(factory, error, message):
    with pytest.raises(error, match=message):
        IsolatedEnvironment(factory)


def test_a_factory_that_hangs():
    started = time.monotonic()
    with pytest.raises(TimeoutError, match=r"was not there after 0\.3 s"):
        IsolatedEnvironment(lambda: time.sleep(100), start_timeout=0.3)
    assert time.monotonic() - started < 2.0
    assert eventually(lambda: not children_of(isolation_server._server.process.pid))


# --- Failures in the child ------------------------------------------------------------------------


def test_exceptions_keep_type_message_and_traceback(env):
    with pytest.raises(KeyError, match="gone") as caught:
        env.raises(KeyError, "gone")
    assert "in raises" in "".join(caught.value.__notes__)
    with pytest.raises(TimeoutError, match="of the tool"):
        env.raises(TimeoutError, "of the tool")
    assert env.step("a")[0] == "A"


@pytest.mark.parametrize(
    ("method", "args", "message"),
    [
        ("raises", (TwoArguments, 3, "why"), "TwoArguments: why (3)"),
        ("raises", (BuildsItsMessage, 3), "BuildsItsMessage: code 3"),
        ("raises_local", (), "LocalError: here only"),
        ("raises_loaded", (), "ValueError: carries a lock"),
        ("raises", (HomeBound,), "HomeBound: "),
        ("raises", (SystemExit, 3), "SystemExit: 3"),
        ("leave", (), "SystemExit: 4"),
        ("interrupts", (), "KeyboardInterrupt: "),
    ],
)
def test_what_cannot_travel_is_reported_as_text(env, method, args, message):
    with pytest.raises(RuntimeError) as caught:
        env.call(method, *args)
    assert (type(caught.value), str(caught.value)) == (RuntimeError, message)
    assert env.step("a")[0] == "A"
    assert env.search("b") == "b True"


def test_results_and_arguments_that_cannot_travel(env):
    with pytest.raises(TypeError, match=r"`lock` gave a lock, which cannot be sent"):
        env.lock()
    with pytest.raises(TypeError, match=r"`local` gave a Local, which cannot be sent"):
        env.local()
    with pytest.raises(TypeError, match=r"`home_bound` gave a HomeBound.*: far from home"):
        env.home_bound()
    with pytest.raises(TypeError, match=r"argument of `step` cannot be sent"):
        env.step(i for i in range(3))
    assert env.step("a")[0] == "A"


@pytest.mark.parametrize(
    ("method", "argument", "message"),
    [
        ("exits", 3, "Env .* ended in or before `exits`: exit code 3"),
        ("signals", signal.SIGKILL, "signal 9"),
        ("signals", signal.SIGSEGV, r"signal 11 \(Segmentation fault\)"),
    ],
)
def test_a_child_that_dies_names_its_end(env, method, argument, message):
    with pytest.raises(EnvironmentDied, match=message):
        env.call(method, argument)
    assert not env.alive
    with pytest.raises(EnvironmentDied, match="`step`"):
        env.step("a")
    with pytest.raises(EnvironmentDied):
        env.get("name")


def test_killed_from_outside_between_calls(env):
    os.kill(env.pid, signal.SIGKILL)
    assert eventually(lambda: not env.alive)
    with pytest.raises(EnvironmentDied, match="signal 9"):
        env.step("a")


def test_ctrl_c_belongs_to_the_trainer(env):
    assert env.signals(signal.SIGINT) == "still here"
    server = isolation_server._server.process
    os.kill(server.pid, signal.SIGINT)
    assert env.step("a")[0] == "A"
    assert server.poll() is None
    assert os.getsid(env.pid) == env.pid  # out of reach of the terminal


def test_a_server_that_dies_takes_its_children_along_and_is_replaced(env):
    isolation_server._server.process.kill()
    result = in_thread(env.hangs)()
    assert isinstance(result, EnvironmentDied)
    assert "no word from its fork server" in str(result)
    assert eventually(lambda: not is_running(env.pid))
    isolation_server._server.process.wait()
    other = IsolatedEnvironment(Env)
    assert other.step("a")[0] == "A"
    other.kill()


# --- Kill and close -------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "args"), [("hangs", ()), ("sleeps", (100,))])
def test_kill_ends_a_call_of_another_thread(env, method, args):
    result = in_thread(lambda: env.call(method, *args))
    time.sleep(0.2)
    started = time.monotonic()
    env.kill()
    assert isinstance(result(), EnvironmentDied)
    assert time.monotonic() - started < 1.0
    assert not is_running(env.pid)
    assert not env.alive
    env.kill()
    env.close()


def test_kill_ends_the_subprocesses_of_a_tool(env):
    pid = env.spawns()
    assert is_running(pid)
    env.kill()
    assert eventually(lambda: not is_running(pid))


def test_subprocesses_of_a_child_that_exits_end_with_it(env, tmp_path):
    with pytest.raises(EnvironmentDied, match="exit code 0"):
        env.spawns_and_exits(str(tmp_path / "pid"))
    pid = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not is_running(pid))


def test_one_call_at_a_time(env):
    results = [in_thread(lambda: env.overlaps(0.05)) for _ in range(4)]
    assert [result() for result in results] == [1, 1, 1, 1]


def test_answers_reach_the_thread_that_asked(env):
    results = [in_thread(lambda i=i: [env.step(f"x{i}")[0] for _ in range(20)]) for i in range(4)]
    assert [set(result()) for result in results] == [{f"X{i}"} for i in range(4)]


def test_close_calls_close_and_ends_the_child(tmp_path):
    marks = [str(tmp_path / name) for name in ("closed", "at_exit")]

    class Closing:
        async def close(self):
            import atexit

            open(marks[0], "w").close()
            atexit.register(lambda: open(marks[1], "w").close())

    env = IsolatedEnvironment(Closing)
    env.close()
    assert [os.path.exists(mark) for mark in marks] == [True, True]
    assert not env.alive
    assert not is_running(env.pid)
    env.close()
    for other in (IsolatedEnvironment(Env), IsolatedEnvironment(dict)):  # dict has no close
        other.close()
        assert not is_running(other.pid)


def test_close_is_bounded_and_passes_errors_on():
    class Stuck:
        def close(self):
            time.sleep(100)

    class Failing:
        def close(self):
            raise ValueError("not closed")

    stuck, busy, failing = (IsolatedEnvironment(make) for make in (Stuck, Env, Failing))
    call = in_thread(lambda: busy.sleeps(100))
    started = time.monotonic()
    closing = [in_thread(stuck.close), in_thread(busy.close)]
    assert [done() for done in closing] == [None, None]
    assert time.monotonic() - started < 3.0
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
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Interrupted):
            env.sleeps(0.5)
    finally:
        signal.signal(signal.SIGALRM, previous)
    with pytest.raises(EnvironmentDied):
        env.step("a")


# --- Nothing stays --------------------------------------------------------------------------------


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
        return env if i % 4 < 2 else None  # else dropped

    cycle(0)
    gc.collect()  # failures of other tests hold environments in their tracebacks
    server = isolation_server._server.process.pid
    assert eventually(lambda: not children_of(server))
    before = descriptors(), descriptors(server), children_of(os.getpid())
    kept = [cycle(i) for i in range(50)]
    assert eventually(lambda: not children_of(server))
    assert eventually(
        lambda: (descriptors(), descriptors(server), children_of(os.getpid())) == before
    )
    del kept


def test_a_child_holds_no_descriptors_of_others(env):
    others = [IsolatedEnvironment(Env) for _ in range(3)]
    # Its connection, and the pair of its event loop.
    assert {one.sockets() for one in (env, *others)} == {3}
    for one in others:
        one.kill()


def test_many_at_once():
    made = [in_thread(lambda: IsolatedEnvironment(Env)) for _ in range(16)]
    envs = [result(20.0) for result in made]
    assert len({env.pid for env in envs}) == 16
    assert {env.step("a")[0] for env in envs} == {"A"}
    for env in envs:
        env.kill()
    assert eventually(lambda: not children_of(isolation_server._server.process.pid))


def test_a_fork_of_the_caller_neither_kills_nor_keeps_the_child(env):
    pid = os.fork()
    if not pid:  # as a DataLoader worker does, which then stays
        isolation_server.release_sockets(*env._release.detach()[2])
        time.sleep(100)
        os._exit(0)
    other = IsolatedEnvironment(Env)
    holder = os.fork()
    if not holder:
        time.sleep(100)
        os._exit(0)
    try:
        time.sleep(0.1)
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
from trl_stppo.rollout import isolation_server
print(*(e.pid for e in [*envs, idle]), isolation_server._server.process.pid, flush=True)
"""


def test_a_hanging_child_does_not_block_the_exit_of_the_caller():
    process = run_script(HANGING + "print(time.time(), flush=True)")
    pids, asked = process.stdout.readline(), process.stdout.readline()
    assert process.wait(20) == 0
    assert time.time() - float(asked) < 2.0
    assert not any(is_running(int(pid)) for pid in pids.split())
    assert process.communicate(timeout=5) == ("", "")


# Linux kills the children with the server, elsewhere the server must do so.
ELSEWHERE = """
from trl_stppo.rollout import isolation_server
isolation_server._SERVER_CODE = isolation_server._SERVER_CODE.replace(
    "isolation_server._serve", "sys.platform = 'other'; isolation_server._serve"
)
"""


@pytest.mark.parametrize(
    ("number", "head"), [(signal.SIGKILL, ""), (signal.SIGTERM, ""), (signal.SIGKILL, ELSEWHERE)]
)
def test_no_child_outlives_a_killed_caller(number, head):
    process = run_script(head + HANGING + "time.sleep(100)")
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 4
    assert all(is_running(pid) for pid in pids)
    process.send_signal(number)
    process.communicate(timeout=10)
    assert process.returncode == -number
    assert eventually(lambda: not any(is_running(pid) for pid in pids), 3.0)


@pytest.mark.parametrize("head", ["", ELSEWHERE])
def test_no_child_outlives_a_killed_caller_whose_fork_lives_on(head):
    fork = "if not (pid := os.fork()):\n    time.sleep(100)\nprint(pid, flush=True)\n"
    process = run_script(head + HANGING + fork + "time.sleep(100)")
    pids = [int(pid) for pid in process.stdout.readline().split()]
    holder = int(process.stdout.readline())
    try:
        process.kill()
        process.wait()
        assert eventually(lambda: not any(is_running(pid) for pid in pids), 4.0)
    finally:
        os.kill(holder, signal.SIGKILL)
        process.communicate(timeout=10)


@pytest.mark.skipif(sys.platform != "linux", reason="prlimit")
def test_a_server_without_descriptors_refuses_and_goes_on():
    process = run_script(
        "import resource\n"
        "from trl_stppo.rollout import isolation_server\n"
        "env = IsolatedEnvironment(dict)\n"
        "server = isolation_server._server.process.pid\n"
        "limits = resource.prlimit(server, resource.RLIMIT_NOFILE)\n"
        "for room in (1, 0):\n"
        "    time.sleep(0.5)  # until the server has closed what belongs to the last order\n"
        "    used = {int(fd) for fd in os.listdir(f'/proc/{server}/fd')}\n"
        "    limit = [fd for fd in range(len(used) + 2) if fd not in used][room]\n"
        "    resource.prlimit(server, resource.RLIMIT_NOFILE, (limit, limits[1]))\n"
        "    try:\n"
        "        IsolatedEnvironment(dict)\n"
        "    except EnvironmentDied as error:\n"
        "        print(str(error).partition(': ')[2])\n"
        "    resource.prlimit(server, resource.RLIMIT_NOFILE, limits)\n"
        "print(env.keys and IsolatedEnvironment(dict).alive)\n"
    )
    expected = "not started: out of file descriptors\nno word from its fork server\nTrue\n"
    assert process.communicate(timeout=20) == (expected, "")


def test_output_of_the_child_passes_through_even_if_it_is_killed():
    process = run_script(
        "class Env:\n"
        "    def talk(self):\n"
        "        print('from the child')\n"
        "        while True: pass\n"
        "env = IsolatedEnvironment(Env)\n"
        "threading.Thread(target=env.talk, daemon=True).start()\n"
        "time.sleep(0.3)\nenv.kill()\n",
        env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
    )
    assert process.communicate(timeout=20)[0] == "from the child\n"


def test_the_caller_stays_as_it_was():
    def state():
        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        method = multiprocessing.get_start_method(allow_none=True)
        loops = asyncio.get_event_loop_policy()
        return handlers, method, loops, list(sys.path), dict(os.environ), os.getcwd()

    before, threads = state(), threading.active_count()
    env = IsolatedEnvironment(lambda: Env())
    env.search("a")
    env.kill()
    assert state() == before
    assert threading.active_count() == threads


def test_the_module_is_light():
    code = "import sys, trl_stppo.rollout.isolation; print(*{'torch', 'dill'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("", "")
