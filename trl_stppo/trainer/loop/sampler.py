"""Choice of the backend that samples turns: our cached generation, vLLM, or TRL's generation call."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch

from ...generation.batched import BatchedBackend, CollectiveBackend, GenerateBatch
from ...generation.cached import CachedBackend, PolicyCopy
from ...generation.probe import why_unlike
from ...generation.protocol import Backend
from ...generation.sampling import SamplingSettings, shaping
from ...generation.slots import supports
from .._trl import new_token_limit, overrides, prepare_frozen, unwrap_model_for_generation
from ..bridge import Bridge
from ..optimizers import policy_parameters
from ..sharding import runtime
from .vllm import VLLM

logger = logging.getLogger(__name__)


class TurnSampler:
    """Makes the backend that samples the turns of a rollout."""

    def __init__(self, host: Bridge, tokenizer: Any, vllm: VLLM) -> None:
        self._host, self._tokenizer = host, tokenizer
        self.vllm = vllm

    @property
    def tells_logprobs(self) -> bool:
        """Return whether sampled tokens come with log-probabilities."""
        return self._host.use_vllm or self._is_cached

    @property
    def _is_cached(self) -> bool:
        return why_not_cached(self._host) is None and self._is_right

    @cached_property
    def _is_right(self) -> bool:
        """Return whether cached generation gives the forward pass's log-probabilities on every process."""
        rough = self._host.accelerator.mixed_precision != "no"
        with generation_model(self._host) as model:
            reason = why_unlike(model, self._tokenizer.pad_token_id, rough=rough)
        wrong = any(found for found, *_ in self._exchange((int(reason is not None), 0, 0)))
        if wrong and self._host.accelerator.is_main_process:
            logger.warning("Turns go through `generate`. %s", reason or "Another process chose so.")
        return not wrong

    @contextmanager
    def backend(self, version: int | None = None) -> Iterator[Backend]:
        """Context manager with a rollout's backend; `version`: optimizer steps of an older policy."""
        host = self._host
        capacity, end = host.args.generation_slots, self._tokenizer.eos_token_id
        if speaks_to_vllm(host):
            with self.vllm.backend(capacity, version) as backend:
                yield backend
            return
        version = host.state.global_step if host.use_vllm else version
        if self._is_collective:
            together = CollectiveBackend(self._batches(), self._exchange, end, capacity=capacity)
            together.version = version
            yield together
            together.finish()
            return
        if not self._is_cached:
            batched = BatchedBackend(self._batches(), capacity=capacity)
            batched.version = version
            yield batched
            return
        with generation_model(host) as model:
            backend = self._cached(model, version)
            with backend.running():
                yield backend

    def ahead(self, version: int) -> Backend:
        """Return a backend for another thread with the current weights; `version`: their optimizer steps."""
        host = self._host
        if host.use_vllm:
            return self.vllm.ahead(host.args.generation_slots, version)
        self._copy.refresh()
        return self._cached(self._copy.model, version)

    def check_ahead(self) -> None:
        """Raise ValueError if a copy of the policy would sample differently; all processes must call this."""
        if self._host.use_vllm:
            return
        reason = None if self._is_cached else "is not sampled by our cache"
        try:
            reason = reason or self._copy.why_unfit()
        except TypeError as error:
            # `copy.deepcopy` may fail for an attribute of the model.
            reason = f"cannot be made ({error})"
        if any(found for found, *_ in self._exchange((int(reason is not None), 0, 0))):
            raise ValueError(
                f"`rollout_overlap=True`: a copy of the {type(self._host.model).__name__} "
                f"{reason or 'fails on another process'}. Use a vLLM server, or leave it out."
            )

    @cached_property
    def _copy(self) -> PolicyCopy:
        host = self._host
        trained = (parameter for _, parameter in policy_parameters(host.model, host.critic))
        with generation_model(host) as model:
            return PolicyCopy(model, trained, lambda copied: prepare_frozen(copied, host))

    @property
    def is_exact(self) -> bool | None:
        """Return whether sampler and training should agree to float32's accuracy; None if settings differ."""
        host, policy = self._host, self._host.accelerator.unwrap_model(self._host.model)
        settings, _ = sampling_settings(host)
        if settings is None or settings.truncates or not host.args.disable_dropout:
            return None
        rough = host.use_vllm or host.accelerator.mixed_precision != "no"
        rough = rough or any(p.itemsize < 4 for p in policy.parameters())
        # Only the CPU is exact, because other devices may round to TF32.
        return not rough and host.accelerator.device.type == "cpu"

    def _cached(self, model: Any, version: int | None) -> CachedBackend:
        host = self._host
        settings, _ = sampling_settings(host)
        assert settings is not None
        pad, capacity = self._tokenizer.pad_token_id, host.args.generation_slots
        ends = host.eos_token_ids
        backend = CachedBackend(model, settings, ends, pad_token_id=pad, capacity=capacity)
        backend.version = version
        return backend

    @property
    def _is_collective(self) -> bool:
        """Return whether all processes must make TRL's generation call together."""
        host = self._host
        if host.accelerator.num_processes == 1:
            return False
        if not host.use_vllm:
            return runtime.shards_weights(host.accelerator) and not self._is_cached
        return host.vllm_mode == "server" or host.args.vllm_tensor_parallel_size > 1

    def _batches(self) -> GenerateBatch:
        """Return TRL's generation call as a function of (ids, max_new_tokens, seeds) that ignores seeds."""
        host = self._host

        def generate(
            ids: list[list[int]], max_new_tokens: int, seeds: list[tuple[int, ...]]
        ) -> tuple[list[list[int]], list[list[float]] | None]:
            training = host.model.training
            with new_token_limit(host, max_new_tokens):
                result = self._host.generate_single_turn(ids, None, {}, 1)
            # Continuous batching leaves the model in train mode.
            if host.model.training != training:
                host.model.train(training)
            return result

        return generate

    def _exchange(self, numbers: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Gather three numbers of every process."""
        local = torch.tensor([numbers], device=self._host.accelerator.device)
        return [(a, b, c) for a, b, c in self._host.accelerator.gather(local).tolist()]


def why_not_cached(host: Bridge) -> str | None:
    """Return the reason why our cached generation cannot sample turns, or None."""
    if host.use_vllm:
        return "vLLM generates."
    if host.use_transformers_continuous_batching:
        return "Continuous batching generates."
    if overrides(host, "_generate_single_turn"):
        return f"{type(host).__name__} generates by itself."
    return supports(host.accelerator.unwrap_model(host.model)) or sampling_settings(host)[1]


def sampling_settings(host: Bridge) -> tuple[SamplingSettings | None, str | None]:
    """Return (settings, None) for our own sampler, or (None, the reason why only `generate` can sample)."""
    if host.use_vllm:
        if (args := host.args).generation_kwargs:
            return None, f"`generation_kwargs={args.generation_kwargs!r}`"
        names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
        return SamplingSettings(**{name: getattr(args, name) for name in names}), None
    model = host.accelerator.unwrap_model(host.model)
    return SamplingSettings.from_generation_config(host.generation_config, model.generation_config)


def warn_of_hidden_settings(host: Bridge) -> None:
    """Warn of settings in the model's own generation configuration that the ratios ignore."""
    if host.use_vllm or host.rollout_func is not None or not host.accelerator.is_main_process:
        return
    own = host.accelerator.unwrap_model(host.model).generation_config.to_diff_dict()
    given = [name for name, value in host.generation_kwargs.items() if value is not None]
    if hidden := shaping(own, [*given, "cache_implementation"]):
        logger.warning(
            "`model.generation_config` has %s: it shapes what is sampled, and the ratios ignore it.",
            ", ".join(hidden),
        )


def speaks_to_vllm(host: Bridge) -> bool:
    """Return whether turns go to vLLM one by one, which a colocated engine on several GPUs does not allow."""
    alone = host.vllm_mode == "server" or host.args.vllm_tensor_parallel_size == 1
    return host.use_vllm and alone and not overrides(host, "_generate_single_turn")


@contextmanager
def generation_model(trainer: Any) -> Iterator[Any]:
    """Context manager with the unwrapped policy, ready to generate, as in GRPOTrainer's generation."""
    with (
        unwrap_model_for_generation(
            trainer.model_wrapped,
            trainer.accelerator,
            gather_deepspeed3_params=trainer.args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
        ) as model,
        runtime.whole_weights(trainer.accelerator, model),
    ):
        # Yield the original model, because a compiled model has other arguments.
        yield getattr(model, "_orig_mod", model)
