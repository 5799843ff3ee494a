"""vLLM as the sampler of a rollout: transfer of weights, and backends that sample single turns."""

from __future__ import annotations

import itertools
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from ...generation.engine import EngineBackend, ServerBackend
from ...generation.protocol import Backend
from .. import _trl_vllm
from ..ppo_config import PPOConfig


class VLLM:
    """Syncs weights to vLLM and makes its backends; all processes call the methods together.

    `generation` is upstream's `VLLMGeneration`, or None without vLLM. `step` returns the present optimizer
    step. `load` is the bridge's `load_vllm`.
    """

    def __init__(
        self,
        args: PPOConfig,
        accelerator: Accelerator,
        generation: Any,
        step: Callable[[], int],
        load: Callable[[Callable[[], None], int], None],
    ) -> None:
        self._args, self._accelerator, self._generation = args, accelerator, generation
        self.step, self._load = step, load
        self._run, self._numbers = uuid.uuid4().hex[:8], itertools.count(1)
        self._adapter: object = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def sync(self, version: int | None = None) -> int:
        """Send the weights if vLLM lacks them; return their optimizer steps. All processes call this."""
        version = self.step() if version is None else version
        self._load(self._send_to_server if self._is_server else self._send, version)
        return version

    @property
    def _is_server(self) -> bool:
        return self._args.vllm_mode == "server"

    def _send(self) -> None:
        """Send the policy's weights to a colocated engine."""
        if _trl_vllm.has_adapters(self._generation):
            self._write_adapter()
        else:
            self._generation.sync_weights()

    def _send_to_server(self) -> None:
        """Send the policy's weights and their name to the server; all processes raise an error."""
        main = self._accelerator.is_main_process
        sent: list[str | Exception] = [""]
        try:
            self._generation.sync_weights()
            if main:
                sent = [self._client.name_weights(f"{self._run}-{next(self._numbers)}")]
        except Exception as error:
            if not main:
                raise
            sent = [_trl_vllm.failed("did not take the weights", error)]
        (name,) = broadcast_object_list(sent)
        if isinstance(name, Exception):
            raise name
        self._client.weights = name

    def _write_adapter(self) -> None:
        """Write the adapter under a new name, which the engine's prefix cache uses as key."""
        folder = tempfile.TemporaryDirectory(prefix="trl-stppo-adapter-")
        policy = self._accelerator.unwrap_model(self._generation.model)
        # `save_embedding_layers` is off, because PEFT's default queries the Hub for the vocabulary's size.
        policy.save_pretrained(folder.name, selected_adapters=["default"], save_embedding_layers=False)
        self._adapter = _trl_vllm.adapter(next(self._numbers), folder.name)
        if self._folder is not None:
            self._folder.cleanup()
        self._folder = folder

    @cached_property
    def _client(self) -> _trl_vllm.TurnClient:
        client = _trl_vllm.new_client(self._generation, self._args.vllm_server_timeout)
        return _trl_vllm.TurnClient(client, self._generation)

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
        yield self._at_server(capacity, version)

    def _at_server(self, capacity: int | None, version: int) -> ServerBackend:
        backend = ServerBackend(self._client.sample, capacity=capacity)
        backend.version = version
        return backend

    def ahead(self, capacity: int | None, version: int) -> Backend:
        """Return a server backend for another thread."""
        return self._at_server(capacity, self.sync(version))
