"""What tests of environments in processes share: a tool that does everything wrong, and ways to look."""

import asyncio
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.kit.waiting import PATIENCE

ROOT = Path(__file__).resolve().parents[2]


class TwoArguments(Exception):
    def __init__(self, code, reason):
        super().__init__(f"{reason} ({code})")
        self.code = code


class BuildsItsMessage(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")


class Env:
    """Everything that a tool may do right or wrong."""

    def __init__(self, name="default"):
        self.name = name
        self.turn_rewards = []
        self.client_loop = None
        self.depth = 0
        self.bound = functools.partial(self.place)

    @functools.cached_property
    def table(self):
        return {"a": 1}

    def place(self):
        return os.getpid()

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

    def interrupts_and_hangs(self, caller):
        os.kill(caller, signal.SIGALRM)
        self.hangs()

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

    def torch_is_loaded(self):
        return "torch" in sys.modules

    def __len__(self):
        return 3

    @property
    def broken(self):
        raise ValueError("property")

    class Nested:
        pass


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def descriptors(pid="self") -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def children_of(pid: int) -> set[int]:
    """Zombies included."""
    while True:
        try:
            files = Path(f"/proc/{pid}/task").glob("*/children")
            return {int(child) for file in files for child in file.read_text().split()}
        except (FileNotFoundError, ProcessLookupError):
            continue


def descendants() -> set[int]:
    """Process ids of everything that this process has started."""
    found, more = set(), {os.getpid()}
    while more:
        more = {child for pid in more for child in children_of(pid)} - found
        found |= more
    return found


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

    def result():
        thread.join(PATIENCE)
        assert outcome, "the thread is still busy"
        return outcome[0]

    return result


def run_script(body: str, **kwargs):
    head = "import os, sys, time, threading\nfrom trl_stppo.rollout.isolation import *\n"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([sys.executable, "-c", head + body], cwd=ROOT, **pipes, **kwargs)
