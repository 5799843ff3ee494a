"""Starts trainings of `tests.real_vllm.run`, and reads what was seen of them."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.kit.launch import launcher
from tests.real_vllm.server import ROOT, SURROUNDINGS, free_port

SECONDS = 900.0


class Training:
    """One training in processes of its own; in process, vLLM would take over the threads of torch.

    The folder gets the settings, what is printed, and the results; `flags` are of `trl-stppo train`.
    """

    def __init__(
        self,
        folder: Path,
        processes: int = 1,
        engine: dict[str, Any] | None = None,
        variables: dict[str, str] | None = None,
        **flags: Any,
    ) -> None:
        self._folder, self._processes = folder, processes
        path = folder / "settings.json"
        path.write_text(json.dumps({"flags": flags, "engine": engine or {}}), "utf-8")
        words = [sys.executable, *(launcher(processes) if processes > 1 else [])]
        # vLLM and accelerate would both take the same free port of their own choice.
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [*words, "-m", "tests.real_vllm.run", str(path)],
                **{"cwd": ROOT, "stdout": log, "stderr": log},
                env={**os.environ, **SURROUNDINGS, **place, **(variables or {})},
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def results(self) -> list[dict[str, Any]]:
        """Wait for its end; what each process has written."""
        try:
            code = self._process.wait(SECONDS)
        finally:
            self.kill()
        assert code == 0, f"it ended with {code}\n{self.said()}"
        ranks = (self._folder / f"rank{rank}.json" for rank in range(self._processes))
        return [json.loads(path.read_text("utf-8")) for path in ranks]

    def said(self) -> str:
        return (self._folder / "log").read_text("utf-8", "replace")[-6000:]

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
