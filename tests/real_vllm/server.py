"""A vLLM server in a process group of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.kit.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "scripts" / "assets" / "search-agent"
SURROUNDINGS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
SURROUNDINGS |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
# A start imports for twenty seconds of an idle core.
START_SECONDS = 400.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return urllib.request.urlopen(f"{url}/health", timeout=10).status == 200
    return False


class Server:
    """vLLM's own server with the shipped agent, in float32."""

    def __init__(self, log: Path, *options: str) -> None:
        self.log, self._options, self.port = log, options, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it, also a second time, and wait until it answers."""
        words = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        words += ["--model", str(MODEL), "--host", "127.0.0.1", "--port", str(self.port)]
        words += ["--enforce-eager", "--dtype", "float32", "--max-model-len", "1024"]
        words += ["--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"]
        words += ["--weight-transfer-config", '{"backend": "nccl"}']
        words += ["--worker-extension-cls", "tests.real_vllm.server_side.PlainWeights"]
        # The development mode is what has the calls that load weights.
        environment = {**os.environ, **SURROUNDINGS, "VLLM_SERVER_DEV_MODE": "1"}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*words, *self._options],
                **{"cwd": ROOT, "env": environment, "stdout": log, "stderr": log},
                start_new_session=True,
            )
        process = self._process
        wait_until(lambda: answers(self.url) or process.poll() is not None, START_SECONDS)
        if not answers(self.url):
            self.kill()
            raise RuntimeError(f"vLLM did not start:\n{self.log.read_text('utf-8')[-4000:]}")

    def kill(self) -> None:
        """End it and its workers at once; one that has ended is fine."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
