"""Guards that skip optimizer steps, raise alarms and end a run; see `docs/reliability.md`."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor, nn

from ...rollout.episode import Episode
from ..disk import checkpoints
from ..ppo_config import PPOConfig
from ..step import Step
from .alarms import PATIENCE, FallWatch, SamplerWatch, failures_of
from .endings import MAX_SKIPS, Ending
from .verdict import Verdict

logger = logging.getLogger(__name__)

KINDS = ("the loss", "the policy's gradient", "the critic's gradient")


@dataclasses.dataclass
class GuardState:
    """Guard counters that are saved in a checkpoint.

    Attributes:
        empty_steps: number of steps without an episode to train on, or with only weights of 0.
        kls: `policy/approx_kl` of the mini-batches of the last update.
        best: success, or score, of the best rollout, with `save_best`.
        best_step: optimizer steps of the policy that played the best rollout.
    """

    skipped_steps: int = 0
    consecutive_skips: int = 0
    empty_steps: int = 0
    kl_stopped_steps: int = 0
    kls: list[float] = dataclasses.field(default_factory=list)
    best: float = -math.inf
    best_step: int | None = None


class Guards:
    """Decides which optimizer steps are skipped and when a run ends, equally on all processes.

    `metrics`: the values of the next log.
    """

    def __init__(
        self,
        args: PPOConfig,
        accelerator: Any,
        step: Step,
        ending: Ending,
        metrics: dict[str, list[float]],
        *,
        has_critic: bool,
    ) -> None:
        self._args, self._accelerator, self._step = args, accelerator, step
        self.ending, self._metrics = ending, metrics
        self._has_critic = has_critic
        self._policy: Sequence[tuple[str, nn.Parameter]] = ()
        self.verdict = Verdict.TAKEN
        self._begin()

    def _begin(self) -> None:
        # Whether the rest of this rollout batch must not move the weights.
        self._rollout_stopped = False
        self.load_state_dict({})
        self.start_mini_batch()

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint, equal on all processes."""
        watched = {
            "failures": self.ending.failures.state_dict(),
            "falls": self._falls.state_dict(),
            "sampler": vars(self._sampler).copy(),
        }
        return {**dataclasses.asdict(self._state), **watched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the guards from `state_dict`; missing fields start at zero, unknown fields are ignored."""
        counts = dict(state)
        self.ending.failures.load_state_dict(counts.pop("failures", []))
        episodes = self._args.generation_batch_size
        self._falls = FallWatch(episodes, **counts.pop("falls", {}))
        # Pass values by position, so that fields can be renamed.
        self._sampler = SamplerWatch(*counts.pop("sampler", {}).values())
        names = {spec.name for spec in dataclasses.fields(GuardState)}
        self._state = GuardState(**{name: counts[name] for name in names & counts.keys()})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager of a complete `train()` that resets the guards and handles signals."""
        self._begin()
        self.ending.reset()
        self.ending.training = True
        try:
            with self.ending.signals.watching():
                yield
        finally:
            self.ending.training = False

    @contextmanager
    def around_rollout(self) -> Iterator[None]:
        """Context manager around a rollout batch: clear a `target_kl` stop, then check for a collapse."""
        self._rollout_stopped = False
        metrics = self._metrics
        before = {name: len(values) for name, values in metrics.items()}
        with self.ending.saving():
            yield
        new = {name: v[-1] for name, v in metrics.items() if len(v) > before.get(name, 0)}
        kls, self._state.kls = self._state.kls, []
        step = self.ending.state.global_step
        fall = self._falls.look(new, statistics.fmean(kls) if kls else None, step)
        if fall and self._accelerator.is_main_process:
            folders = checkpoints(Path(self._args.output_dir))
            good = [f for f in folders if int(f.name.split("-")[1]) <= self._falls.good_step]
            logger.warning(
                "In the rollout after step %d, %s. Last checkpoint before the fall: %s. First try a third of "
                "the learning rate; see docs/collapse.md.",
                step, fall, good[-1] if good else "none, so begin again",
            )  # fmt: skip

    def keep_best(self, episodes: list[Episode], scores: list[float]) -> None:
        """Save the policy that played a rollout if the rollout is the best so far (`save_best`).

        The measure is the mean success, or the mean score if no environment reports a success.
        """
        state = self._state
        if not self._args.save_best:
            return
        local = [(e.success, s) for e, s in zip(episodes, scores, strict=True)]
        played = [result for part in gather_object([local]) for result in part]
        known = [success for success, _ in played if success is not None]
        known = known or [score for _, score in played if not math.isnan(score)]
        level = statistics.fmean(known) if known else -math.inf
        if level <= state.best:
            return
        state.best, state.best_step = level, self.ending.state.global_step
        self.ending.save_before_rollout()

    @property
    def best_checkpoint(self) -> Path:
        """Return the checkpoint of the policy that played the best rollout."""
        return Path(self._args.output_dir) / f"checkpoint-{self._state.best_step}"

    def watch_sampler(self, gap: float, *, exact: bool) -> None:
        """End the run if several rollouts in a row were sampled with wrong weights."""
        message, watch = self._sampler.look(gap, exact=exact), self._sampler
        self._metrics["guard/sampler_mismatch"] = [watch.blocks]
        if watch.count >= PATIENCE:
            self.ending.reason, watch.count = self.ending.reason or message, 0
        elif message and watch.blocks == 1 and self._accelerator.is_main_process:
            logger.warning("After step %d: %s", self.ending.state.global_step, message)

    def count_failures(self, episodes: list[Episode]) -> None:
        """Count the failed episodes of a rollout batch; raise if their rate is too high."""
        self.ending.failures.rollout(gather_object([failures_of(episodes)]), episodes[0].columns)

    @property
    def leaves_weights(self) -> bool:
        """Return whether the mini-batch must leave the weights unchanged."""
        return self._rollout_stopped or self._empty

    def start_mini_batch(self, *, empty: bool = False) -> None:
        """Reset the checks for a mini-batch; `empty`: no process has an episode to train on."""
        self._losses: list[Tensor] = []
        self._weight: Tensor | None = None
        self._faults = ""
        self._broken_parts = [False] * len(KINDS)
        self._empty, self._weightless = empty, False

    def add_loss(self, loss: Tensor) -> None:
        """Record a micro-batch's loss, detached."""
        self._losses.append(loss)

    def add_weights(self, weights: Tensor) -> None:
        """Record a micro-batch's episode weights, [B], to detect a gradient multiplied by 0."""
        self._weight = weights.sum() + (0.0 if self._weight is None else self._weight)

    def check_before_backward(self, loss: Tensor) -> bool:
        """Raise if a process's loss is not finite; return whether any episode weight so far is not 0."""
        weight = torch.ones_like(loss) if self._weight is None else self._weight
        flags = torch.stack([(~loss.detach().isfinite()).long(), (weight != 0).long()])
        broken, weighs = self._accelerator.gather(flags.unsqueeze(0)).T.tolist()
        if any(broken):
            self._faults = f"{KINDS[0]} ({_processes(broken)})"
            self._losses.append(loss.detach())
            self._warn("skipped")
            self._count_skip()
            raise self.ending.before_backward(self._faults)
        return any(weighs)

    def inspect(self, policy: Sequence[tuple[str, nn.Parameter]]) -> bool:
        """Gather the checks of all processes; return whether the step may use the gradients.

        Call it before clipping, which would spread one NaN to every gradient. `policy`: the policy's
        trained parameters.
        """
        device, critic_grads = self._accelerator.device, self._step.critic_grads
        if self._has_critic and critic_grads.is_empty and not self.leaves_weights:
            raise TypeError("`_compute_loss` has not trained the critic: call super().")
        # Skip a policy whose step is already taken.
        self._policy = () if self._step.engine.steps_in_backward else policy
        faults = [
            _broken(self._losses, device),
            _broken((p.grad for _, p in self._policy), device),
            _broken([critic_grads.norm()], device),
        ]
        weight = torch.ones((), device=device) if self._weight is None else self._weight
        local = torch.stack([*(fault.long() for fault in faults), (weight == 0).long()])
        local = torch.cat([local, self.ending.received()])
        gathered = self._accelerator.gather(local.unsqueeze(0))
        *columns, weightless = gathered[:, :-2].T.tolist()
        self._weightless = all(weightless)
        self.ending.agree(gathered[:, -2:].tolist())
        pairs = zip(KINDS, columns, strict=True)
        self._faults = ", ".join(f"{kind} ({_processes(c)})" for kind, c in pairs if any(c))
        self._broken_parts = list(map(any, columns))
        return not self._faults and not self.leaves_weights

    @property
    def takes_back_fault(self) -> bool:
        """Return whether the policy is not finite after a step that can be taken back."""
        region = self._step.region
        return region is not None and region.has_moved and self._broken_parts[1]

    @property
    def may_use_critic(self) -> bool:
        """Return whether the critic's gradient is finite, and the critic may take its step."""
        return not self._broken_parts[-1] and not self.leaves_weights

    def admit(self, figures: dict[str, float]) -> bool:
        """Set the verdict on an optimizer step from its metrics; return whether the policy may step."""
        state, region = self._state, self._step.region
        limit = math.inf if self._args.target_kl is None else self._args.target_kl
        # Without a scale the norm is only a diagnostic.
        norm = figures.get("clip_bias/norm", figures.get("clip_bias/norm_estimate", 0.0))
        if not self._faults and "clip_bias/scale" in figures and not math.isfinite(norm):
            self._faults = "the gradient of the clipped terms"
        exceeds = region is not None and region.exceeds
        if self.takes_back_fault or (region is not None and exceeds and region.has_moved):
            self.verdict = Verdict.TAKEN_BACK
            if self._faults:
                self._warn("taken back")
        elif self._faults:
            self.verdict = Verdict.NOT_FINITE
            self._warn("skipped")
            self._count_skip()
        elif exceeds:
            self.verdict = Verdict.REFUSED
        elif self._rollout_stopped or figures.get("policy/approx_kl", 0.0) > limit:
            self.verdict = Verdict.TARGET_KL
            self._rollout_stopped = True
            state.kl_stopped_steps += 1
        elif self._empty or self._weightless:
            critic_only = self._has_critic and not self._empty
            self.verdict = Verdict.CRITIC_ONLY if critic_only else Verdict.EMPTY
            state.empty_steps += 1
        else:
            self.verdict = Verdict.TAKEN
            state.consecutive_skips = 0
        if "policy/approx_kl" in figures:
            state.kls.append(figures["policy/approx_kl"])
        self._log()
        self._losses = []
        return self.verdict is Verdict.TAKEN

    def _warn(self, what: str) -> None:
        accelerator = self._accelerator
        broken = [float(loss) for loss in self._losses if not bool(loss.isfinite().all())]
        gradients = [(name, p.grad) for name, p in self._policy if p.grad is not None]
        names = [name for name, gradient in gradients if not bool(gradient.isfinite().all())]
        if accelerator.is_main_process or broken:
            logger.warning(
                "Step %d is %s, not finite: %s. On process %d: losses %s of %d; gradients of %s.",
                self.ending.state.global_step + 1, what, self._faults, accelerator.process_index,
                broken, len(self._losses), ", ".join(names[:3] + ["..."] * (len(names) > 3)) or "none",
            )  # fmt: skip

    def _count_skip(self) -> None:
        state = self._state
        state.skipped_steps += 1
        state.consecutive_skips += 1
        if state.consecutive_skips >= MAX_SKIPS:
            self.ending.broken = self._faults
            # A resumed run counts skips from zero.
            state.consecutive_skips = 0

    def _log(self) -> None:
        """Set the guards' totals in the next log, because upstream would average values that are appended."""
        figures = self._metrics
        figures["guard/skipped_steps"] = [self._state.skipped_steps]
        figures["guard/empty_steps"] = [self._state.empty_steps]
        figures["guard/falls"] = [self._falls.falls]
        if self._args.target_kl is not None:
            figures["guard/kl_stopped_steps"] = [self._state.kl_stopped_steps]


def _broken(tensors: Iterable[Tensor | None], device: torch.device) -> Tensor:
    """Return whether any tensor has a NaN, an infinity or an overflowing norm, as a 0-dim bool tensor."""
    sound = [torch.ones((), dtype=torch.bool, device=device)]
    for tensor in tensors:
        if tensor is not None:
            part = getattr(tensor, "to_local", lambda whole=tensor: whole)()
            dtype = torch.promote_types(part.dtype, torch.float32)
            norm = torch.linalg.vector_norm(part, dtype=dtype)
            sound.append(norm.isfinite().to(device))
    return ~torch.stack(sound).all()


def _processes(flags: list[int]) -> str:
    ranks = [str(rank) for rank, flag in enumerate(flags) if flag]
    return f"process{'es' if len(ranks) > 1 else ''} {', '.join(ranks)}"
