"""Choice of the backend that samples turns: our cached generation, vLLM, or TRL's generation call."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from accelerate import Accelerator
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...generation.batched import BatchedBackend, CollectiveBackend, GenerateBatch
from ...generation.cached import CachedBackend
from ...generation.probe import why_unlike
from ...generation.protocol import Backend
from ...generation.sampling import SamplingSettings
from ...generation.slots import supports
from ...rollout.images import ImageReader
from .._trl import unwrap_model_for_generation
from ..engine import engine_of
from ..ppo_config import PPOConfig
from ..sharding import runtime
from .vllm import VLLM

logger = logging.getLogger(__name__)


@dataclass(eq=False, repr=False)
class TurnSampler:
    """Makes the backend that samples the turns of a rollout.

    `policy`, `wrapped` (the policy in its engine) and `generation_config` return what upstream has at
    present. `generate` is TRL's generation call; `why_own` returns a text that it is overridden, or None.
    `reader` reads images; it is None if the policy reads only text.
    """

    args: PPOConfig
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    vllm: VLLM
    end_ids: list[int]
    policy: Callable[[], PreTrainedModel]
    wrapped: Callable[[], nn.Module]
    generation_config: Callable[[], GenerationConfig]
    generate: GenerateBatch
    why_own: Callable[[], str | None]
    reader: ImageReader | None = None

    @property
    def tells_logprobs(self) -> bool:
        """Return whether sampled tokens come with log-probabilities."""
        return self.args.use_vllm or self.is_cached

    @property
    def is_cached(self) -> bool:
        """Return whether our cached generation samples turns."""
        return self.why_not_cached() is None and self._is_right

    @cached_property
    def _is_right(self) -> bool:
        """Return whether cached generation gives the forward pass's log-probabilities on every process."""
        rough = self.accelerator.mixed_precision != "no"
        with self.generating() as model:
            pad = self.tokenizer.pad_token_id
            reason = why_unlike(model, pad, rough=rough, reader=self.reader)
        wrong = any(found for found, *_ in self.exchange((int(reason is not None), 0, 0)))
        if wrong and self.accelerator.is_main_process:
            logger.warning("Turns go through `generate`. %s", reason or "Another process chose so.")
        return not wrong

    @contextmanager
    def backend(self, version: int | None = None) -> Iterator[Backend]:
        """Context manager: a rollout's backend; `version`: steps of an older policy that samples."""
        capacity, end = self.args.generation_slots, self.tokenizer.eos_token_id
        if self.speaks_to_vllm:
            with self.vllm.backend(capacity, version) as backend:
                yield backend
            return
        version = self.vllm.step() if self.args.use_vllm else version
        if self._is_collective:
            together = CollectiveBackend(self.generate, self.exchange, end, capacity=capacity)
            together.version = version
            yield together
            together.finish()
        elif self.is_cached:
            with self.generating() as model:
                backend = self.cached(model, version)
                with backend.running():
                    yield backend
        else:
            batched = BatchedBackend(self.generate, capacity=capacity)
            batched.version = version
            yield batched

    @property
    def is_exact(self) -> bool | None:
        """Return whether sampler and training should agree to float32's accuracy; None if settings differ."""
        settings, _ = self._settings()
        if settings is not None and self.reader is not None:
            # Log-probabilities ignore suppressed tokens, and every run with images suppresses some.
            settings = replace(settings, suppress_tokens=None)
        if settings is None or settings.truncates or not self.args.disable_dropout:
            return None
        rough = self.args.use_vllm or self.accelerator.mixed_precision != "no"
        rough = rough or any(p.itemsize < 4 for p in self._unwrapped.parameters())
        # Only the CPU is exact, because other devices may round to TF32.
        return not rough and self.accelerator.device.type == "cpu"

    def cached(self, model: PreTrainedModel, version: int | None) -> CachedBackend:
        """Return a backend of our cached generation; `version`: steps of an older policy that samples."""
        settings, _ = self._settings()
        assert settings is not None
        pad, capacity = self.tokenizer.pad_token_id, self.args.generation_slots
        backend = CachedBackend(
            model, settings, self.end_ids, pad_token_id=pad, capacity=capacity, reader=self.reader
        )
        backend.version = version
        return backend

    @property
    def _is_collective(self) -> bool:
        """Return whether all processes must make TRL's generation call together."""
        args = self.args
        if self.accelerator.num_processes == 1:
            return False
        if not args.use_vllm:
            return engine_of(self.accelerator).gathers and not self.is_cached
        return args.vllm_mode == "server" or args.vllm_tensor_parallel_size > 1

    def why_not_cached(self) -> str | None:
        """Return the reason why our cached generation cannot sample turns, or None."""
        if self.args.use_vllm:
            return "vLLM generates."
        if self.args.use_transformers_continuous_batching:
            return "Continuous batching generates."
        return self.why_own() or supports(self._unwrapped) or self._settings()[1]

    @property
    def speaks_to_vllm(self) -> bool:
        """Return whether turns go to vLLM one by one, which colocated vLLM on several GPUs does not allow."""
        args = self.args
        alone = args.vllm_mode == "server" or args.vllm_tensor_parallel_size == 1
        return args.use_vllm and alone and self.why_own() is None

    def _settings(self) -> tuple[SamplingSettings | None, str | None]:
        """Return (settings, None) for our own sampler, or (None, why only `generate` can sample)."""
        args = self.args
        if args.use_vllm:
            if args.generation_kwargs:
                return None, f"`generation_kwargs={args.generation_kwargs!r}`"
            names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
            return SamplingSettings(**{name: getattr(args, name) for name in names}), None
        given, own = self.generation_config(), self._unwrapped.generation_config
        return SamplingSettings.from_generation_config(given, own)

    @property
    def _unwrapped(self) -> PreTrainedModel:
        return self.accelerator.unwrap_model(self.policy())

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """Context manager with the unwrapped policy, ready to generate, as in GRPOTrainer's generation."""
        with (
            unwrap_model_for_generation(
                self.wrapped(),
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ) as model,
            runtime.whole_weights(self.accelerator, model),
        ):
            # Yield the original model, because a compiled model has other arguments.
            yield getattr(model, "_orig_mod", model)

    def exchange(self, numbers: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Gather three numbers of every process."""
        local = torch.tensor([numbers], device=self.accelerator.device)
        return [(a, b, c) for a, b, c in self.accelerator.gather(local).tolist()]
