"""Starts a module on two processes, as torchrun does, and reads what they save."""

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch

from tests.kit import warm
from tests.kit.warm import ENVIRONMENT, ROOT

__all__ = [
    "ENVIRONMENT", "ROOT", "by_case", "launcher", "on_two_processes", "save_cases", "two_processes",
]  # fmt: skip


def launcher(processes: int) -> list[str]:
    """Arguments of Python that make it start so many processes of the module that follows."""
    # It listens on a port of its own choice: one that was looked for could be taken meanwhile.
    return ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]


def environment_of(rank: int, processes: int, port: int) -> dict[str, str]:
    """What torchrun tells a process on its one machine; the store's port is that of `port`."""
    # The last: whoever starts the processes holds the store, as torchrun does.
    return {
        **{name: str(rank) for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")},
        **{n: str(processes) for n in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")},
        **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_NAME": "default"},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        **{"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"},
    }


def on_two_processes(
    module: str,
    folder: Path,
    *arguments: str,
    timeout: float = 900,
    weights_only: bool = True,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """Run `module folder arguments`; returns what each rank has saved as `folder/rank<r>.pt`."""
    codes, said = two_processes([module, str(folder), *arguments], timeout, environment)
    assert codes == [0, 0], f"they ended with {codes}\n{said}"
    return [torch.load(folder / f"rank{r}.pt", weights_only=weights_only) for r in (0, 1)]


def by_case(
    module: str, cases: Iterable[str], now: Collection[str], folders: Any, **options: Any
) -> Callable[[str], list[Any]]:
    """What both ranks say to a case: `module folder case ...` is run when one of them is asked for.

    Cases in `now` have a start of their own; `folders` makes a folder for each start, `options` are of
    `on_two_processes`.
    """
    results: dict[str, list[Any]] = {}
    everything = list(cases)

    def of(case: str) -> list[Any]:
        if case not in results:
            together = [other for other in everything if (other in now) == (case in now)]
            ranks = on_two_processes(module, folders.mktemp("two"), *together, **options)
            results.update({name: [rank[name] for rank in ranks] for name in together})
        return results[case]

    return of


def save_cases(run: Callable[[str, Path], Any], *cases: str) -> None:
    """In a process that was started so: runs these cases, or those among its arguments, each in a folder."""
    folder, *given = Path(sys.argv[1]), *sys.argv[2:]
    results = {case: run(case, folder / str(i)) for i, case in enumerate(cases or given)}
    torch.save(results, folder / f"rank{os.environ['RANK']}.pt")


def two_processes(
    words: list[str], timeout: float, environment: dict[str, str] | None = None, count: int = 2
) -> tuple[list[int], str]:
    """Run the module and its arguments; returns how both have ended, and what they have said.

    After `timeout` seconds they are killed. `environment` comes besides their surroundings.
    """
    # Port 0: one that was looked for could be taken meanwhile.
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = {**os.environ, **ENVIRONMENT, **(environment or {})}
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(count)]
        ranks = [
            warm.Process(
                [sys.executable, "-m", *words],
                **{"cwd": ROOT, "env": {**given, **environment_of(rank, count, store.port)}},
                **{"stdout": log, "stderr": log},
            )
            for rank, log in enumerate(logs)
        ]
        wait_for_all(ranks, timeout)
        for log in logs:
            log.seek(0)
        said = [f"process {rank}:\n{log.read()[-6000:]}" for rank, log in enumerate(logs)]
        return [process.returncode for process in ranks], "\n".join(said)


def wait_for_all(processes: list[warm.Process], timeout: float) -> None:
    """Until all have ended well; those that wait for one that has not, or hang, are killed."""
    until = time.monotonic() + timeout
    try:
        codes = [None]
        while None in codes and not any(codes) and time.monotonic() < until:
            time.sleep(0.02)
            codes = [process.poll() for process in processes]
    finally:
        for process in processes:
            process.kill_group()
            process.wait()
