"""The early end of a run, on all processes together, with a checkpoint and a message."""

from __future__ import annotations

import logging
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_utils import SaveStrategy

from ...errors import EnvironmentFailureError, NonFiniteError, RolloutError
from ...models.critic import Critic
from ...rollout.episode import Episode
from ...rollout.workers import RolloutInterrupted
from ..disk import checkpoints
from ..ppo_config import PPOConfig
from .alarms import FailureWatch, failures_of
from .signals import URGENT, StopSignals
from .weights import first_not_finite

logger = logging.getLogger(__name__)
# Optimizer steps in a row that may be skipped because a value is not finite; then the run ends.
MAX_SKIPS = 3


class Ending(TrainerCallback):
    """Collects reasons to stop, and stops the run at a point from which it can resume exactly.

    `save` writes a checkpoint; `inside_update` returns whether more steps will train on the present rollout.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        critic: Critic,
        save: Callable[[], None],
        inside_update: Callable[[], bool],
        *,
        handles_signals: bool,
    ) -> None:
        self._accelerator, self._critic = accelerator, critic
        self._save, self._inside_update = save, inside_update
        # The newest checkpoint that this run has written or resumed from.
        self.last_checkpoint: Path | None = None
        self.failures = FailureWatch()
        self.signals = StopSignals(handles_signals)
        self.training = self._stepped = False
        # Policy and state of the current training; an engine may replace both at its start.
        self._model: nn.Module = nn.Module()
        self.state = TrainerState()
        self.reset()

    def reset(self) -> None:
        """Reset reason, signal and random states for a new run."""
        self.reason: str | None = None
        # What was not finite in too many steps: `on_step_end` then saves and stops, `on_save` raises.
        self.broken: str | None = None
        # Whether the run has taken a step that is in no checkpoint.
        self.unsaved = False
        # Evaluation and save that wait for the end of the update.
        self.postponed = False, False
        self.before: list[Any] | None = None
        self._agreed = self._count = 0
        self._failures_before: list[list[int]] = []

    @property
    def signal(self) -> int | None:
        """Return the number of the signal that the run has received, or None."""
        return self._agreed or self.signals.received

    def received(self) -> Tensor:
        """Return this process's signal number, or 0, and its number of signals, [2] int64 on the device."""
        values = [self.signals.received or 0, self.signals.count]
        return torch.tensor(values, device=self._accelerator.device)

    def agree(self, everyone: list[list[int]]) -> None:
        """Set the run's signal and number of signals to the largest of all processes' `received`."""
        self._agreed, self._count = map(max, zip(*everyone, strict=True))

    def count_failures(self, episodes: list[Episode]) -> None:
        """Count the failed episodes of a rollout batch; raise if their rate is too high."""
        self.failures.rollout(gather_object([failures_of(episodes)]), episodes[0].columns)

    def is_due(self) -> bool:
        """Decide whether the run must end now, and set `reason`; equal on all processes."""
        if self._accelerator.num_processes == 1:
            self.agree([self.received().tolist()])
        if self.broken is not None:
            self.reason = f"not finite: {self.broken}"
        state = self.state
        waits = self._inside_update() and not self.is_urgent
        ends = self._agreed and not waits and state.global_step < state.max_steps
        if ends and self.reason is None:
            self.reason = f"signal {signal.Signals(self._agreed).name}"
        return self.reason is not None

    @property
    def is_urgent(self) -> bool:
        """Return whether the run ends after the present step, because of a second signal."""
        return self._count >= URGENT

    def postpone(self, control: TrainerControl) -> None:
        """Postpone an evaluation and a save that are due inside an update to the update's end."""
        evaluates, saves = self.postponed
        due = evaluates or control.should_evaluate, saves or control.should_save
        waits = self._inside_update() and not control.should_training_stop
        self.postponed = due if waits else (False, False)
        control.should_evaluate, control.should_save = (False, False) if waits else due
        # A run that ends early evaluates no more.
        control.should_evaluate &= self.reason is None

    def abandon_rollout(self) -> None:
        """Raise RolloutInterrupted on all processes if any has received a signal."""
        if not self.training:
            return
        self.agree(self._accelerator.gather(self.received().unsqueeze(0)).tolist())
        if self._agreed:
            raise RolloutInterrupted

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager that saves the run if a signal or an error on all processes ends a rollout."""
        if self.training:
            self.check_weights()
        self._failures_before = self.failures.state_dict()
        try:
            yield
        except RolloutInterrupted:
            self.is_due()
            # A resumed run plays these episodes again, and counts their failures then.
            self.failures.load_state_dict(self._failures_before)
            self._save_as_before()
            raise
        except Exception as error:
            ours = isinstance(error, EnvironmentFailureError | NonFiniteError | RolloutError)
            if not self.training or not (ours or self._accelerator.num_processes == 1):
                raise
            self.reason = str(error)
            # A resumed run counts failures from zero.
            self.failures.clear()
            self._save_as_before()
            end = f"The run ends after step {self.state.global_step}. {self._saved('these episodes')}"
            if not ours:
                logger.error("%s", end)
                raise
            if isinstance(error, NonFiniteError):
                end += " Try bf16=False or a model in float32."
            raise type(error)(f"{error} {end}") from error.__cause__

    def _save_as_before(self) -> None:
        """Write a checkpoint of the state before the current rollout, if that state is not saved yet."""
        if not self.unsaved:
            return
        if self.before is not None:
            set_random_states(self.before)
        self._save()

    def check_weights(self) -> None:
        """Raise NonFiniteError if a trained weight is not finite."""
        found = first_not_finite(self._model, self._critic, self._accelerator)
        if found is None:
            return
        step, last = self.state.global_step, self.last_checkpoint
        self.reason = f"not finite: the weights after step {step}, first in the {found}"
        good = f"the last good checkpoint is {last or 'none'}"
        if not self.unsaved and last is not None:
            good = f"they come from {last}, which is not a good checkpoint"
        raise NonFiniteError(
            f"Weights are not finite after step {step}, first in the {found}; they are not saved, and {good}."
        )

    def _saved(self, what: str) -> str:
        last = self.last_checkpoint
        if last is None:
            return "Nothing was saved, as nothing had been trained yet."
        older = [folder for folder in checkpoints(last.parent) if folder != last]
        return (
            f"The run as it stood before {what} is saved in {last} (the checkpoint before it: "
            f"{older[-1] if older else 'none'})."
        )

    def cannot_skip(self, what: str) -> NonFiniteError:
        """Return the error for a non-finite value under DeepSpeed, which cannot skip a step."""
        return NonFiniteError(
            f"{_sentence(what)} was not finite at step {self.state.global_step + 1}. DeepSpeed "
            f"cannot leave a step out. The last checkpoint is {self.last_checkpoint or 'none'}."
        )

    def on_train_begin(
        self, _: object, state: TrainerState, *__: object, model: nn.Module, **kwargs: object
    ) -> None:
        """Check at the start of training that the loaded weights are finite."""
        self._stepped, self._model, self.state = False, model, state
        self.check_weights()

    def on_epoch_begin(self, *_: object, **kwargs: object) -> None:
        """Record the random states before the epoch's rows are read, for a run that resumes from here."""
        self.before = random_states(self._accelerator.device)

    def on_step_begin(self, *_: object, **kwargs: object) -> None:
        """Record the random states after the rows are read, for a run that resumes from here."""
        if self.before is None:
            self.before = random_states(self._accelerator.device)

    def on_step_end(self, _: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        """Save and end the run after an optimizer step if there is a reason, without a due evaluation."""
        self._stepped = self.unsaved = True
        self.before = None
        due = self.is_due()
        control.should_save = control.should_save or bool(self._agreed)
        if due:
            # After a signal the checkpoint keeps unlogged metrics for the resumed run.
            control.should_log = control.should_log or not self._agreed
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False

    def on_evaluate(self, args: PPOConfig, state: object, control: TrainerControl, **kwargs: object) -> None:
        """End the run after an evaluation if there is a reason, before a long rollout begins."""
        # With "best", upstream decides on saving after this callback, so do not stop here.
        outside = not self.training or not self._stepped
        if outside or args.save_strategy == SaveStrategy.BEST:
            return
        self.agree(self._accelerator.gather(self.received().unsqueeze(0)).tolist())
        if self.is_due():
            control.should_training_stop = control.should_save = True

    def on_epoch_end(self, _: object, state: object, control: TrainerControl, **kwargs: object) -> None:
        """Prevent a second checkpoint and evaluation at the end of a run that ends early."""
        if self.reason is not None:
            control.should_evaluate = control.should_save = False

    def on_save(self, *_: object, **kwargs: object) -> None:
        """Raise NonFiniteError after too many consecutive skipped steps, once the checkpoint is written."""
        self.unsaved = False
        if self.broken is None:
            return
        # No process may exit while another process still writes.
        self._accelerator.wait_for_everyone()
        raise NonFiniteError(
            f"{_sentence(self.broken)} was not finite at step {self.state.global_step}, the last of "
            f"{MAX_SKIPS} skipped steps in a row. {self._saved('them')}"
        )

    def on_train_end(self, _: object, state: TrainerState, *__: object, **kwargs: object) -> None:
        """Log the reason of a run that ended early without an error."""
        if self.reason is not None and self._accelerator.is_main_process:
            last = self.last_checkpoint
            saved = f'`resume_from_checkpoint="auto"` goes on from {last}' if last else "No checkpoint"
            logger.warning(
                "Training stopped after step %d of %d: %s. %s.",
                state.global_step, state.max_steps, self.reason, saved,
            )  # fmt: skip


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:]


def random_states(device: torch.device) -> list[Any]:
    """Return the states of all random generators that a checkpoint keeps."""
    states = [random.getstate(), np.random.get_state(), torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state())
    return states


def set_random_states(states: list[Any]) -> None:
    """Restore the states of `random_states`."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    for state in states[3:]:
        torch.get_device_module().set_rng_state(state)
