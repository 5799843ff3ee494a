"""Guards that skip optimizer steps, raise alarms and end a run; see `docs/reliability.md`."""

from __future__ import annotations

import dataclasses
import logging
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from ...errors import NonFiniteError
from ..disk import checkpoints
from ..ppo_config import PPOConfig
from ..step import StepReport, Verdict
from .alarms import PATIENCE, FallWatch, SamplerWatch
from .endings import MAX_SKIPS, Ending

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class GuardState:
    """Guard counters that are saved in a checkpoint.

    Attributes:
        empty_steps: number of steps without an episode to train on, or with only weights of 0.
        kls: `policy/approx_kl` of the mini-batches of the last update.
    """

    skipped_steps: int = 0
    consecutive_skips: int = 0
    empty_steps: int = 0
    kls: list[float] = dataclasses.field(default_factory=list)


class Guards:
    """Decides which optimizer steps are skipped and when a run ends, equally on all processes.

    `metrics`: the values of the next log.
    """

    def __init__(
        self,
        args: PPOConfig,
        accelerator: Accelerator,
        ending: Ending,
        metrics: dict[str, list[float]],
        *,
        has_critic: bool,
    ) -> None:
        self._args, self._accelerator = args, accelerator
        self._ending, self._metrics = ending, metrics
        self._has_critic = has_critic
        self._begin()

    def _begin(self) -> None:
        self.load_state_dict({})

    def state_dict(self) -> dict[str, Any]:
        """Return plain data for a checkpoint, equal on all processes."""
        watched = {
            "failures": self._ending.failures.state_dict(),
            "falls": self._falls.state_dict(),
            "sampler": vars(self._sampler).copy(),
        }
        return {**dataclasses.asdict(self._state), **watched}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the guards from `state_dict`; missing fields start at zero, unknown fields are ignored."""
        counts = dict(state)
        self._ending.failures.load_state_dict(counts.pop("failures", []))
        episodes = self._args.generation_batch_size
        self._falls = FallWatch(episodes, **counts.pop("falls", {}))
        self._sampler = SamplerWatch(**counts.pop("sampler", {}))
        names = {spec.name for spec in dataclasses.fields(GuardState)}
        self._state = GuardState(**{name: counts[name] for name in names & counts.keys()})

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager of a complete `train()` that resets the guards and handles signals."""
        self._begin()
        self._ending.reset()
        self._ending.training = True
        try:
            with self._ending.signals.watching():
                yield
        finally:
            self._ending.training = False

    @contextmanager
    def around_rollout(self) -> Iterator[None]:
        """Context manager around a rollout batch that checks for a collapse at the end."""
        metrics = self._metrics
        before = {name: len(values) for name, values in metrics.items()}
        with self._ending.saving():
            yield
        new = {name: v[-1] for name, v in metrics.items() if len(v) > before.get(name, 0)}
        kls, self._state.kls = self._state.kls, []
        step = self._ending.state.global_step
        fall = self._falls.look(new, statistics.fmean(kls) if kls else None, step)
        if fall and self._accelerator.is_main_process:
            folders = checkpoints(Path(self._args.output_dir))
            good = [f for f in folders if int(f.name.split("-")[1]) <= self._falls.good_step]
            logger.warning(
                "In the rollout after step %d, %s. Last checkpoint before the fall: %s. docs/reliability.md "
                "says what to look at.",
                step, fall, good[-1] if good else "none, so begin again",
            )  # fmt: skip

    def watch_sampler(self, gap: float, *, exact: bool) -> None:
        """End the run if several rollouts in a row were sampled with wrong weights."""
        message, watch = self._sampler.look(gap, exact=exact), self._sampler
        self._metrics["guard/sampler_mismatch"] = [watch.blocks]
        if watch.count >= PATIENCE:
            self._ending.reason, watch.count = self._ending.reason or message, 0
        elif message and watch.blocks == 1 and self._accelerator.is_main_process:
            logger.warning("After step %d: %s", self._ending.state.global_step, message)

    def cannot_skip(self, faults: str) -> NonFiniteError:
        """Return the error for a non-finite loss under an engine that cannot skip a step."""
        self._count_skip(faults)
        return self._ending.cannot_skip(faults)

    def judge(
        self,
        report: StepReport,
        kl: float | None,
        *,
        is_empty: bool = False,
        warms_up: bool = False,
    ) -> Verdict:
        """Return the verdict on an optimizer step, and count it.

        Args:
            report: the facts about the step.
            kl: `policy/approx_kl` of the mini-batch in nats; None without a policy's pass.
            is_empty: whether no process has an episode to train on.
            warms_up: whether the step trains only the critic.
        """
        state = self._state
        if report.faults:
            verdict = Verdict.NOT_FINITE
            self._warn(report)
            self._count_skip(report.faults)
        elif report.exceeds:
            verdict = Verdict.REFUSED
            state.consecutive_skips = 0
        elif is_empty or report.is_weightless:
            critic_only = self._has_critic and not is_empty
            verdict = Verdict.CRITIC_ONLY if critic_only else Verdict.EMPTY
            state.empty_steps += 1
        else:
            verdict = Verdict.CRITIC_ONLY if warms_up else Verdict.TAKEN
            state.consecutive_skips = 0
        if kl is not None:
            state.kls.append(kl)
        self._log()
        return verdict

    def _warn(self, report: StepReport) -> None:
        if report.detail:
            logger.warning(
                "Step %d is skipped, not finite: %s. On process %d: %s.",
                self._ending.state.global_step + 1, report.faults, self._accelerator.process_index,
                report.detail,
            )  # fmt: skip

    def _count_skip(self, faults: str) -> None:
        state = self._state
        state.skipped_steps += 1
        state.consecutive_skips += 1
        if state.consecutive_skips >= MAX_SKIPS:
            self._ending.broken = faults
            # A resumed run counts skips from zero.
            state.consecutive_skips = 0

    def _log(self) -> None:
        """Replace the guards' totals in the next log, because upstream averages appended values."""
        figures = self._metrics
        figures["guard/skipped_steps"] = [self._state.skipped_steps]
        figures["guard/empty_steps"] = [self._state.empty_steps]
        figures["guard/falls"] = [self._falls.falls]
