"""Saving and restoring of a run's state besides weights and optimizers.

Checkpoints stand between rollouts: a save or an evaluation that is due inside an update is made at the
update's end, and a resumed run begins with a rollout.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import TrainerCallback, TrainerState

from ...models.critic import SharedCritic
from ...paths import CRITIC_FOLDER
from .. import disk
from .._trl import replaced
from ..bridge import Bridge, Wrapped
from ..describe import algorithm_settings
from ..engine import engine_of
from ..guards.endings import Ending
from ..guards.steps import Guards
from ..optimizers import Optimizers
from ..rollouts import StalePolicies
from ..sharding.critics import loading
from ..stabilizers import Stabilizer

logger = logging.getLogger(__name__)
STATE, REFERENCE = "run_state.pt", "reference.pt"


def loaded(path: Path) -> Any:
    """Load plain data and tensors from a file of a checkpoint."""
    return torch.load(path, map_location="cpu", weights_only=True)


class RunState(TrainerCallback):
    """Saves a run's state and its position in the training rows, and restores them on resumption."""

    def __init__(
        self,
        host: Bridge,
        optimizers: Optimizers,
        stale: StalePolicies,
        stabilizers: Sequence[Stabilizer],
        guards: Guards,
        ending: Ending,
    ) -> None:
        self._host, self._stabilizers = host, stabilizers
        self._guards, self._ending = guards, ending
        self._optimizers, self._stale = optimizers, stale
        host.add_callback(self)
        self.folder: Path | None = None
        # The state in the checkpoint, until it is restored.
        self._saved: dict[str, Any] | None = None
        self._newest: torch.Generator | None = None
        self._generator: torch.Generator | None = None
        self._epoch_start: Tensor | None = None
        self._passes = self._pass_start = self._began_at = 0
        self._continues = self._has_loaded = False

    def notice(self, sampler: Sampler | None) -> Sampler | None:
        """Store the random generator of a new sampler of training rows; return the sampler."""
        self._newest = getattr(sampler, "generator", None)
        return sampler

    def begin(self) -> None:
        """Keep the generator of the last sampler made before training; later samplers are for other rows."""
        self._generator = self._newest

    def loader_ahead(self) -> tuple[DataLoader, int]:
        """Return a second dataloader, and the optimizer step of its first row: the beginning of the epoch."""
        loader = self._host.get_train_dataloader()
        if self._newest is not None and self._epoch_start is not None:
            self._newest.set_state(self._epoch_start)
        return loader, self._began_at

    def place_in_stream(self) -> tuple[int, int]:
        """Return the number of completed passes over a stream, and of batches used in the current pass."""
        updates = self._host.state.global_step - self._pass_start
        return self._passes, updates * self._host.args.gradient_accumulation_steps

    def on_epoch_begin(self, _: object, state: TrainerState, *__: object, **kwargs: object) -> None:
        """Record the sampler's random state before it draws the epoch's order of rows."""
        self._epoch_start = None if self._generator is None else self._generator.get_state()
        self._passes += 1
        self._began_at = state.global_step
        if not self._continues:
            self._pass_start = state.global_step
        self._continues = False

    def set_final_loss(self, logs: dict[str, float]) -> None:
        """Average the loss in the run's last log over all steps of the run."""
        if "train_loss" in logs:
            logs["train_loss"] = self._host.loss_sums[1] / max(self._host.state.global_step, 1)

    def write(self, folder: Path) -> None:
        """Save the run's state into a checkpoint; all processes must call this, and one writes."""
        args, saves = self._host.args, self._host.args.should_save
        if saves:
            self._host.state.save_to_json(str(folder / "trainer_state.json"))
        if args.save_only_model:
            return
        folder.mkdir(parents=True, exist_ok=True)
        if self._optimizers.critic is not None:
            self._optimizers.critic.save(folder, writes=saves)
        state = self._collected()
        if saves:
            torch.save(state, folder / STATE)
        if saves and args.sync_ref_model and self._host.ref_model is not None:
            reference = self._host.accelerator.unwrap_model(self._host.ref_model)
            torch.save(reference.state_dict(), folder / REFERENCE)

    def _collected(self) -> dict[str, Any]:
        """Return the state between two rollouts, equal on all processes, which must all call this."""
        host = self._host
        loss, total_loss, last_logged = host.loss_sums
        epoch, sampler = host.state.epoch or 0.0, self._epoch_start
        ended = epoch == int(epoch) and self._began_at != host.state.global_step
        if self._generator is not None and ended:
            sampler = self._generator.get_state()
        return {
            # The next log averages the loss over processes, each of which goes on from its own sum.
            "losses": host.accelerator.gather(loss.detach().reshape(1)).cpu(),
            "total_loss": total_loss,
            "last_logged": last_logged,
            "metrics": {
                mode: {name: [float(value) for value in values] for name, values in figures.items()}
                for mode, figures in host.next_metrics.items()
            },
            "sampler": sampler,
            "passes": self._passes,
            "pass_start": self._pass_start,
            "guards": self._guards.state_dict(),
            "stabilizers": {each.name: each.state_dict() for each in self._stabilizers},
            "stale_policies": self._stale.state_dict(),
        }

    def read(self, folder: Path | None) -> None:
        """Read the state from a checkpoint folder; reset for a new run if `folder` is None."""
        self.folder, self._saved, self._passes, self._pass_start = folder, None, 0, 0
        self._continues, self._has_loaded = folder is not None, False
        if folder is not None:
            self._saved = saved = loaded(folder / STATE)
            self._passes, self._pass_start = saved["passes"] - 1, saved["pass_start"]

    def load(self, wrapped: Wrapped, checkpoint: str, model: nn.Module | None) -> None:
        """Load the policy by upstream's method, then the critic and the reference."""
        with self._without_tied_weights():
            wrapped(checkpoint, model)
        host, folder = self._host, Path(checkpoint)
        policy = host.model if model is None else model
        if isinstance(host.critic, SharedCritic):
            engine_of(host.accelerator).load_adapter(policy, folder)
        self._load_beside_policy(folder)
        self._has_loaded = True

    def load_best(self, wrapped: Wrapped) -> None:
        """Load the best checkpoint's policy by upstream's method, then its critic."""
        with self._without_tied_weights():
            wrapped()
        self._load_models(Path(str(self._host.state.best_model_checkpoint)))

    def _without_tied_weights(self) -> AbstractContextManager[None]:
        """Context manager in which upstream does not warn of tied weights, which are stored only once."""
        model = self._host.model
        tied = list(getattr(model, "all_tied_weights_keys", None) or ())
        return replaced(model, _keys_to_ignore_on_save=tied) if tied else nullcontext()

    def _load_beside_policy(self, folder: Path) -> None:
        """Load the critic, and the reference if `sync_ref_model` is set."""
        host, reference = self._host, folder / REFERENCE
        self._load_models(folder)
        if host.args.sync_ref_model and reference.is_file():
            host.accelerator.unwrap_model(host.ref_model).load_state_dict(loaded(reference))

    def _load_models(self, folder: Path) -> None:
        """Load the critic, and policy weights that upstream skipped because their names differ on disk."""
        host = self._host
        engine_of(host.accelerator).load_skipped(host.model, folder)
        with loading(host.critic):
            host.critic.load(folder / CRITIC_FOLDER)

    def on_train_begin(self, _: object, state: TrainerState, *__: object, **kwargs: object) -> None:
        """Restore the state read from a checkpoint, or reset for a new run."""
        host, saved, folder = self._host, self._saved or {}, self.folder
        # A run begins with a rollout, also where it goes on from a step inside an update.
        host.micro_step, host.rollout_buffer, self._ending.postponed = 0, None, (False, False)
        self._stale.load_state_dict(saved.get("stale_policies", []))
        for each in self._stabilizers:
            each.load_state_dict(saved.get("stabilizers", {}).get(each.name, {}))
        if not saved or folder is None:
            return
        if state.global_step >= state.max_steps and host.accelerator.is_main_process:
            logger.warning(
                "%s is of step %s, and this run ends with step %s: raise total_episodes or max_steps.",
                folder, state.global_step, state.max_steps,
            )  # fmt: skip
        losses, accelerator = saved["losses"].to(host.accelerator.device), host.accelerator
        same = len(losses) == accelerator.num_processes
        loss = losses[accelerator.process_index] if same else losses.mean()
        host.loss_sums = loss, saved["total_loss"], saved["last_logged"]
        for mode, figures in saved["metrics"].items():
            host.next_metrics[mode].update(figures)
        self._guards.load_state_dict(saved["guards"])
        if not self._has_loaded:
            # DeepSpeed loads the policy itself, so upstream does not call `_load_from_checkpoint`.
            self._load_beside_policy(folder)
        # A DeepSpeed critic's optimizer also holds more precise weights, so it is loaded after the critic.
        if self._optimizers.critic is not None:
            self._optimizers.critic.load(folder)
        if self._generator is not None and saved["sampler"] is not None:
            self._generator.set_state(saved["sampler"])
        assert host.optimizer is not None
        self._optimizers.renew(host.optimizer, host.lr_scheduler)
        self._tell_changes(folder)
        self._saved = None

    def _tell_changes(self, folder: Path) -> None:
        """Log the settings that differ from those of the checkpoint."""
        saved, present = disk.read_manifest(folder)["settings"], algorithm_settings(self._host.args)
        pairs = [(n, saved[n], value) for n, value in present.items() if n in saved]
        changed = [f"{n}: {was!r} -> {now!r}" for n, was, now in pairs if was != now]
        if changed and self._host.accelerator.is_main_process:
            logger.warning("%s: the run goes on with new settings: %s", folder, "; ".join(changed))
