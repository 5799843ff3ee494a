"""Saving and restoring of a run's state besides weights and optimizers, and new settings for a resumed run.

Checkpoints stand between rollouts: a save or an evaluation that is due inside an update is made at the
update's end, and a resumed run begins with a rollout. Each process saves the sampler's position and the
metrics that were not logged yet. `renew` writes changed settings into the optimizers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler
from transformers import TrainerCallback, TrainerControl, TrainerState

from ...models.critic import SharedCritic
from ...paths import CRITIC_FOLDER
from .. import disk
from .._trl import replaced
from ..bridge import Bridge, Wrapped
from ..describe import algorithm_settings
from ..engine import engine_of
from ..guards.endings import Ending
from ..guards.steps import Guards
from ..optimizers import CRITIC, DECAYED, GIVEN, PLAIN, Group, Optimizers
from ..rollouts import StalePolicies
from ..sharding.critics import loading
from ..stabilizers import Stabilizer
from ..step import set_base_rate

# This process's entries of a checkpoint, by name.
Saved = dict[str, Any]
Groups = list[tuple[Group, str, int | None]]

# Setting -> key of a parameter group, index in the value if the value is a tuple, and roles of the groups.
_KEPT: dict[str, tuple[str, int | None, tuple[str, ...]]] = {
    "learning_rate": ("lr", None, (DECAYED, PLAIN)),
    "critic_learning_rate": ("lr", None, CRITIC),
    "weight_decay": ("weight_decay", None, (DECAYED, CRITIC[0])),
    "adam_beta1": ("betas", 0, (DECAYED, PLAIN, *CRITIC)),
    "adam_beta2": ("betas", 1, (DECAYED, PLAIN, *CRITIC)),
    "adam_epsilon": ("eps", None, (DECAYED, PLAIN, *CRITIC)),
}
logger = logging.getLogger(__name__)
REFERENCE = "reference.pt"
STALE_POLICIES = "stale_policies.pt"


def renew(host: Bridge, optimizers: Optimizers, folder: Path, saved: dict[str, Any]) -> None:
    """Write changed settings into the optimizers of a resumed run, and log the changes."""
    assert host.optimizer is not None
    groups = _groups(host, optimizers)
    present = algorithm_settings(host.args)
    changed = {n: (saved[n], v) for n, v in present.items() if n in saved and saved[n] != v}
    follows = host.args.derives_critic_rate and "learning_rate" not in changed
    if (follows or not host.has_critic) and "critic_learning_rate" in changed:
        # The user has not set this rate, so the saved rate stays.
        host.args.critic_learning_rate, _ = changed.pop("critic_learning_rate")
    without = [n for n in changed if n in _KEPT and not _write(host, groups, n, *changed[n])]
    if not host.accelerator.is_main_process:
        return

    def listed(names: list[str]) -> str:
        return "; ".join(f"{n}: {changed[n][0]!r} -> {changed[n][1]!r}" for n in names)

    if new := [name for name in changed if name not in without]:
        logger.warning("%s: the run goes on with new settings: %s", folder, listed(new))
    if without:
        logger.warning(
            "%s: new, but without effect: %s. The optimizer was passed in as it is, or has no such value.",
            folder, listed(without),
        )  # fmt: skip


def _groups(host: Bridge, optimizers: Optimizers) -> Groups:
    """Return (group, role, index in the scheduler or None) of each parameter group that this package made."""
    assert host.optimizer is not None
    groups, roles = host.optimizer.param_groups, optimizers.roles
    found: Groups = []
    if len(groups) == len(roles):
        numbered = enumerate(zip(groups, roles, strict=True))
        found = [(group, role, i) for i, (group, role) in numbered if role != GIVEN]
    if optimizers.critic is not None:
        of_critic = zip(optimizers.critic.optimizer.param_groups, CRITIC, strict=False)
        found += [(group, role, None) for group, role in of_critic]
    return found


def _write(host: Bridge, groups: Groups, name: str, old: Any, new: Any) -> bool:
    """Write a setting's new value into its parameter groups; return whether any group has the setting."""
    key, place, roles = _KEPT[name]
    if name.startswith("adam"):
        _, options = host.get_optimizer_cls_and_kwargs(host.args, host.model)
        option = options.get(key)
        if option is None or (option if place is None else option[place]) != new:
            return False
    own = [(group, index) for group, role, index in groups if role in roles and key in group]
    for group, index in own:
        if key == "lr":
            set_base_rate(host.lr_scheduler, group, index, old, new)
        elif place is None:
            group[key] = new
        else:
            group[key] = (*group[key][:place], new, *group[key][place + 1 :])
    return bool(own)


def plain(value: Any) -> Any:
    """Convert a value to tensors, numbers, text, lists and dicts, which load without running code."""
    if isinstance(value, Tensor):
        # Clone, because a view would save its complete storage.
        return value.detach().cpu().clone()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)) or hasattr(value, "appendleft"):
        return [plain(item) for item in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return str(value)


def state_file(folder: Path, process: int) -> Path:
    """Return the path of a process's state file in a checkpoint."""
    return folder / f"run_state_{process}.pt"


def episodes_file(folder: Path, process: int) -> Path:
    """Return the path of a process's file of logged texts, which is not uploaded (`disk.LOCAL`)."""
    return folder / disk.EPISODES.replace("*", str(process))


def loaded(path: Path) -> Any:
    """Load plain data and tensors from a file of a checkpoint."""
    return torch.load(path, map_location="cpu", weights_only=True)


def load_episodes(folder: Path, process: int) -> Saved:
    """Load a checkpoint's logged texts; return {} if the file is missing or damaged."""
    path = episodes_file(folder, process)
    if not path.is_file():
        return {}
    try:
        state: Saved = loaded(path)
    except Exception as error:
        # A truncated file raises several kinds of errors.
        logger.warning(
            "`%s` cannot be read (%s: %s): texts not logged yet are lost.",
            path, type(error).__name__, error,
        )  # fmt: skip
        return {}
    return state


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
        # This process's state in the checkpoint, until it is restored.
        self._saved: Saved | None = None
        self._episodes: Saved = {}
        self._newest: torch.Generator | None = None
        self._generator: torch.Generator | None = None
        self._epoch_start: Tensor | None = None
        self._passes = self._pass_start = self._began_at = 0
        self._continues = self._has_loaded = False
        # Evaluation and save that wait for the end of the update.
        self._due = (False, False)

    def notice(self, sampler: Sampler | None) -> Sampler | None:
        """Store the random generator of a new sampler of training rows; return the sampler."""
        self._newest = getattr(sampler, "generator", None)
        return sampler

    def begin(self) -> None:
        """Keep the generator of the last sampler made before training; later samplers are for other rows."""
        self._generator = self._newest

    def loader_ahead(self) -> tuple[DataLoader, int]:
        """Return a second dataloader, and the step at which the epoch began; its rows begin at that step."""
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

    @property
    def save_waits(self) -> bool:
        """Return whether a save waits for the end of an update."""
        return self._due[1]

    def postpone(self, control: TrainerControl) -> None:
        """Postpone an evaluation and a save that are due inside an update to the update's end."""
        evaluates, saves = self._due
        due = evaluates or control.should_evaluate, saves or control.should_save
        waits = self._host.inside_rollout and not control.should_training_stop
        self._due = due if waits else (False, False)
        control.should_evaluate, control.should_save = (False, False) if waits else due
        # A run that ends early evaluates no more.
        control.should_evaluate &= self._ending.reason is None

    def set_final_loss(self, logs: dict[str, float]) -> None:
        """Average the loss in the run's last log over all steps of the run."""
        if "train_loss" in logs:
            logs["train_loss"] = self._host.loss_sums[1] / max(self._host.state.global_step, 1)

    def write(self, folder: Path) -> None:
        """Save this process's state into a checkpoint; the saving process adds the shared files."""
        args, saves = self._host.args, self._host.args.should_save
        if saves:
            self._host.state.save_to_json(str(folder / "trainer_state.json"))
        if args.save_only_model:
            return
        folder.mkdir(parents=True, exist_ok=True)
        process = self._host.accelerator.process_index
        torch.save(self._collected(), state_file(folder, process))
        # No weight depends on logged texts, so they are in a separate file.
        logs = {key: value for key, value in self._host.next_table.items() if key != "images"}
        torch.save(plain(logs), episodes_file(folder, process))
        if self._optimizers.critic is not None:
            self._optimizers.critic.save(folder, writes=saves)
        if saves and args.rollout_staleness:
            torch.save(self._stale.state_dict(), folder / STALE_POLICIES)
        if saves and args.sync_ref_model and self._host.ref_model is not None:
            reference = self._host.accelerator.unwrap_model(self._host.ref_model)
            torch.save(reference.state_dict(), folder / REFERENCE)

    def _collected(self) -> Saved:
        """Return this process's state between two rollouts."""
        host = self._host
        loss, total_loss, last_logged = host.loss_sums
        epoch, sampler = host.state.epoch or 0.0, self._epoch_start
        ended = epoch == int(epoch) and self._began_at != host.state.global_step
        if self._generator is not None and ended:
            sampler = self._generator.get_state()
        state = {
            "metrics": host.next_metrics,
            "loss": loss,
            "total_loss": total_loss,
            "last_logged": last_logged,
            "sampler": sampler,
            "passes": self._passes,
            "pass_start": self._pass_start,
            "guards": self._guards.state_dict(),
            "stabilizers": {each.name: each.state_dict() for each in self._stabilizers},
        }
        return {key: plain(value) for key, value in state.items()}

    def read(self, folder: Path | None) -> None:
        """Read this process's state from a checkpoint folder; reset for a new run if `folder` is None."""
        self.folder, self._saved, self._passes, self._pass_start = folder, None, 0, 0
        self._continues, self._has_loaded = folder is not None, False
        if folder is None:
            return
        process = self._host.accelerator.process_index
        if not state_file(folder, process).is_file():
            # Fewer processes saved it, so read the main process's state.
            process = 0
        self._saved = loaded(state_file(folder, process))
        self._episodes = load_episodes(folder, process)
        self._passes, self._pass_start = self._saved["passes"] - 1, self._saved["pass_start"]

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
        host, saved, folder = self._host, self._saved, self.folder
        # A run begins with a rollout, also where it goes on from a step inside an update.
        host.micro_step, host.rollout_buffer, self._due = 0, None, (False, False)
        if saved is None or folder is None:
            self._stale.load_state_dict([])
            for each in self._stabilizers:
                each.load_state_dict({})
            return
        if state.global_step >= state.max_steps and host.accelerator.is_main_process:
            logger.warning(
                "%s is of step %s, and this run ends with step %s: raise total_episodes or max_steps.",
                folder, state.global_step, state.max_steps,
            )  # fmt: skip
        self._restore(saved)
        self._restore_episodes()
        if (folder / STALE_POLICIES).is_file():
            self._stale.load_state_dict(loaded(folder / STALE_POLICIES))
        if not self._has_loaded:
            # DeepSpeed loads the policy itself, so upstream does not call `_load_from_checkpoint`.
            self._load_beside_policy(folder)
        # A DeepSpeed critic's optimizer also holds more precise weights, so it is loaded after the critic.
        if self._optimizers.critic is not None:
            self._optimizers.critic.load(folder)
        if self._generator is not None and saved["sampler"] is not None:
            self._generator.set_state(saved["sampler"])
        settings = disk.read_manifest(folder)["settings"]
        renew(host, self._optimizers, folder, settings)
        self._saved, self._episodes = None, {}

    def _restore(self, state: Saved) -> None:
        """Restore the state of `_collected`, except the position in the rows."""
        host = self._host
        for mode, figures in state["metrics"].items():
            host.next_metrics[mode].update(figures)
        loss = state["loss"].to(host.accelerator.device)
        host.loss_sums = loss, state["total_loss"], state["last_logged"]
        self._guards.load_state_dict(state["guards"])
        for each in self._stabilizers:
            each.load_state_dict(state.get("stabilizers", {}).get(each.name, {}))

    def _restore_episodes(self) -> None:
        """Restore the texts that were not logged yet, if the checkpoint has them."""
        logs = self._host.next_table
        for key, entries in self._episodes.items():
            if isinstance(entries, dict):
                for name, values in entries.items():
                    logs[key][name].extend(values)
            else:
                logs[key].extend(entries)
