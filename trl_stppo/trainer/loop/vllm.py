"""vLLM as the sampler of a rollout: transfer of weights, and backends that sample single turns."""

from __future__ import annotations

import itertools
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from accelerate.utils import broadcast_object_list

from ...generation.engine import EngineBackend
from ...generation.protocol import Backend
from ...generation.server import ServerBackend, ServerError
from .. import _trl_vllm
from ..engine import engine_of
from ..ppo_config import PPOConfig

# Interval between checks for a server that is away, in seconds.
LOOK_SECONDS = 1.0


class VLLM:
    """Syncs weights to vLLM and makes its backends; all processes call the methods together.

    `generation` is upstream's `VLLMGeneration`, or None without vLLM. `step` returns the present optimizer
    step. `load` is the bridge's `load_vllm`.
    """

    def __init__(
        self,
        args: PPOConfig,
        accelerator: Any,
        generation: Any,
        step: Callable[[], int],
        load: Callable[..., bool],
    ) -> None:
        self._args, self._accelerator, self._generation = args, accelerator, generation
        self.step, self._load = step, load
        self.figures: dict[str, tuple[float, float]] = {}
        self._run, self._numbers = uuid.uuid4().hex[:8], itertools.count(1)
        # Name of the server's weights.
        self._name = ""
        self._warned = False
        self._adapter: Any = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        # Whether the requests of a push have a time limit.
        self._is_limited = False

    def sync(self, version: int | None = None) -> int:
        """Send the weights if vLLM lacks them; return their optimizer steps. All processes call this."""
        version = self.step() if version is None else version
        lost = self._is_server and self._has_lost()
        if self._load(self._send, version, lost=lost) and self._is_server:
            names = [""]
            if self._accelerator.is_main_process:
                name = f"{self._run}-{version}#{next(self._numbers)}"
                names = [self._client.name_weights(name)]
            self._name = str(broadcast_object_list(names)[0])
        self.figures = {}
        return version

    @property
    def _is_server(self) -> bool:
        return self._args.vllm_mode == "server"

    def _send(self) -> None:
        """Send the policy's weights to vLLM, with a time limit if vLLM is a server."""
        if _trl_vllm.has_adapters(self._generation):
            self._write_adapter()
            return
        main = self._accelerator.is_main_process
        if self._is_server and main and not self._is_limited:
            _trl_vllm.limit_requests(self._generation.vllm_client, _trl_vllm.PUSH_SECONDS)
            self._is_limited = True
        try:
            self._generation.sync_weights()
        except OSError as error:
            raise ServerError(f"The vLLM server did not take the weights: {error}") from error

    def _write_adapter(self) -> None:
        """Write the adapter under a new name, which the engine's prefix cache uses as key."""
        folder = tempfile.TemporaryDirectory(prefix="trl-stppo-adapter-")
        policy = self._accelerator.unwrap_model(self._generation.model)
        # `save_embedding_layers` is off, because PEFT's default queries the Hub for the vocabulary's size.
        policy.save_pretrained(
            folder.name, selected_adapters=["default"], save_embedding_layers=False
        )
        self._adapter = _trl_vllm.adapter(next(self._numbers), folder.name)
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = folder

    @cached_property
    def _client(self) -> _trl_vllm.TurnClient:
        client = _trl_vllm.new_client(self._generation, self._args.vllm_server_timeout)
        return _trl_vllm.TurnClient(client, self._generation)

    def _has_lost(self) -> bool:
        """Return whether the server was restarted; if so, reconnect from the main process."""
        lost: list[Any] = [False]
        if self._accelerator.is_main_process and self._name:
            try:
                lost = [self._present() != self._name]
                if lost[0]:
                    _trl_vllm.rejoin(self._generation)
            except ServerError as error:
                lost = [ServerError(f"The vLLM server stays away: {error}")]
        (found,) = broadcast_object_list(lost)
        if isinstance(found, ServerError):
            raise found
        return bool(found)

    def _present(self) -> str:
        """Return the name of the server's weights; block until the server answers."""
        until = time.monotonic() + self._args.vllm_server_timeout
        while True:
            try:
                return self._client.weights_name()
            except ServerError:
                if time.monotonic() > until:
                    raise
            time.sleep(LOOK_SECONDS)

    def _send_again(self) -> str:
        """Send the weights to a server that was restarted during a rollout."""
        try:
            with _trl_vllm.failures():
                _trl_vllm.rejoin(self._generation)
                self._generation.sync_weights()
            update = self._name.partition("#")[0]
            self._name = self._client.name_weights(f"{update}#{next(self._numbers)}")
        except RuntimeError as error:
            raise ServerError(str(error), unreachable=True) from error
        return self._name

    @contextmanager
    def backend(self, capacity: int | None, version: int | None) -> Iterator[Backend]:
        """Context manager with the backend of one rollout, after a sync of the weights."""
        version, vllm = self.sync(version), self._generation
        if not self._is_server:
            # On a CPU, vLLM's sampler refuses the seed of a turn that is prefilled in chunks.
            seeded = self._accelerator.device.type == "cuda"
            options = _trl_vllm.turn_options(vllm, seeded=seeded, adapter=self._adapter)
            with _trl_vllm.awake(vllm):
                backend = EngineBackend(vllm.llm.llm_engine, options, capacity=capacity)
                backend.version = version
                yield backend
            return
        # Sharded weights need all processes, so one process cannot send them during the rollout.
        can_send = not engine_of(self._accelerator).gathers
        server = self._at_server(capacity, version, can_send=can_send)
        yield server
        figures = self.figures_of(server)
        if vllm.model.training:
            self.figures |= figures

    def _at_server(self, capacity: int | None, version: int, *, can_send: bool) -> ServerBackend:
        client = self._client
        client.names_weights = bool(self._name)
        sends = can_send and self._accelerator.is_main_process
        backend = ServerBackend(
            client,
            self._name,
            patience=self._args.vllm_server_timeout,
            send_weights=self._send_again if sends else None,
            awaits_weights=can_send,
            warned=self._warned,
            capacity=capacity,
        )
        backend.version = version
        return backend

    def ahead(self, capacity: int | None, version: int) -> Backend:
        """Return a server backend for another thread; it sends no weights during the rollout."""
        return self._at_server(capacity, self.sync(version), can_send=False)

    def figures_of(self, backend: Any) -> dict[str, tuple[float, float]]:
        """Return the number of repeated requests of a server's backend as a metric, {} for other backends."""
        if not isinstance(backend, ServerBackend):
            return {}
        self._warned = self._warned or backend.retries > 0
        main = int(self._accelerator.is_main_process)
        return {"sampling/asked_again": (backend.retries, main)}
