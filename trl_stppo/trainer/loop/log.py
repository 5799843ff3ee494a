"""Logging of rollouts: metrics under TRL's names, and the table of completions."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from accelerate.utils import gather_object
from torch import Tensor

from ...rollout.episode import Episode
from ..bridge import Bridge
from ..sums import spread
from .rollout import Rollout

logger = logging.getLogger(__name__)


class RolloutLog:
    """Adds the metrics and completions of rollouts to upstream's next log."""

    def __init__(self, host: Bridge) -> None:
        self._host = host

    def add(self, metrics: dict[str, float]) -> None:
        """Add metrics, equal on all processes, to the next log."""
        for name, value in metrics.items():
            self._host.next_metrics["train"][name].append(value)

    def write(
        self, rollout: Rollout, rewards: Tensor, advantages: Sequence[float], *, spread: bool
    ) -> None:
        """Add a rollout's metrics and completions to the log; `rewards`, [N, F], cover all processes."""
        if self._host.state.global_step == 0 and self._host.accelerator.is_main_process:
            warn_of_invalid(rollout.episodes)
        self._lengths(rollout)
        totals = self._rewards(rewards)
        if spread:
            self._spread(totals)
        self.table(rollout, rewards, advantages)
        self._means(rollout.metric_sums)
        pending = self._host.pending_metrics
        self._means({name: (sum(values), len(values)) for name, values in pending.items()})
        pending.clear()

    def _lengths(self, rollout: Rollout) -> None:
        """Add metrics of completion lengths, of completions without an end, and of tool calls."""
        host, episodes, ends = self._host, rollout.episodes, self._host.end_ids
        numbers = [
            [prompt_tokens(e), e.num_sampled, whole, e.tool_calls, e.tool_failures]
            for e, whole in zip(episodes, rollout.ended(ends), strict=True)
        ]
        local = torch.tensor(numbers, device=host.accelerator.device)
        prompt, tokens, whole, calls, failures = host.accelerator.gather(local).T
        host.state.num_input_tokens_seen += int(prompt.sum() + tokens.sum())
        host.next_metrics["train"]["num_tokens"] = [host.state.num_input_tokens_seen]
        ended = tokens[whole.bool()] if whole.any() else torch.zeros(1)
        for kind, lengths in (("", tokens.float()), ("terminated_", ended.float())):
            figures = {"mean": lengths.mean(), "min": lengths.min(), "max": lengths.max()}
            self.add({f"completions/{k}_{kind}length": v.item() for k, v in figures.items()})
        self.add({"completions/clipped_ratio": (whole == 0).float().mean().item()})
        if host.tools:
            share = (failures.sum() / calls.sum()).item() if calls.any() else 0.0
            self.add({"tools/call_frequency": (calls.sum() / len(calls)).item()})
            self.add({"tools/failure_frequency": share})

    def _rewards(self, rewards: Tensor) -> Tensor:
        """Add the metrics of reward functions; return weighted sums, [N], NaN if all returned None."""
        for name, column in zip(self._host.reward_func_names, rewards.T, strict=True):
            self.add({f"rewards/{name}/mean": torch.nanmean(column).item()})
            self.add({f"rewards/{name}/std": spread(column).item()})
        total = (rewards * self._host.reward_weights.to(rewards.device)).nansum(dim=1)
        total[rewards.isnan().all(dim=1)] = torch.nan
        self.add({"reward": torch.nanmean(total).item()})
        return total

    def _spread(self, totals: Tensor) -> None:
        """Add the deviation of total rewards, over all episodes and within each prompt's group."""
        per_prompt = self._host.num_generations
        self.add({"reward_std": spread(totals).item()})
        if per_prompt > 1:
            flat = spread(totals.view(-1, per_prompt), dim=1) == 0
            self.add({"frac_reward_zero_std": flat.float().mean().item()})

    def table(self, rollout: Rollout, rewards: Tensor, advantages: Sequence[float]) -> None:
        """Add the episodes of all processes to the table of completions."""
        logs = self._host.next_table
        prompts = [rollout.rows[episode.row]["prompt"] for episode in rollout.episodes]
        logs["prompt"].extend(gather_object(prompts))
        logs["completion"].extend(gather_object(rollout.completions(self._host.decode)))
        for name, column in zip(self._host.reward_func_names, rewards.T, strict=True):
            logs["rewards"][name].extend(column.tolist())
        logs["advantages"].extend(advantages)
        # All processes need the same order, so that values keep their names.
        pending = self._host.pending_columns
        for column_name in sorted(set(gather_object(list(pending)))):
            values = pending.get(column_name, [None] * len(prompts))
            logs["extra"][column_name].extend(gather_object(values))
        pending.clear()

    def _means(self, sums: dict[str, tuple[float, float]]) -> None:
        """Log each metric's mean over all processes, from this process's (sum, count) in `sums`."""
        accelerator = self._host.accelerator
        # Sort all names, so that every process reduces the same metric, even if only some processes have it.
        for name in sorted(set(gather_object(list(sums)))):
            local = torch.tensor(sums.get(name, (0.0, 0)), device=accelerator.device)
            total, count = accelerator.reduce(local.float(), reduction="sum").tolist()
            if count:
                self.add({name: total / count})


def warn_of_invalid(episodes: Sequence[Episode]) -> None:
    """Warn with an example if less than three in four of a first rollout's turns are valid actions."""
    turns: list[tuple[bool, str]] = []
    for episode in episodes:
        said = [
            message["content"] or str(message.get("tool_calls", ""))
            for message in episode.messages
            if message["role"] == "assistant"
        ]
        # An environment may report validity for only some turns, which then cannot be matched with messages.
        if len(said) == len(episode.valid_actions):
            turns += zip(episode.valid_actions, said, strict=True)
    wrong = [said for valid, said in turns if not valid]
    if 4 * len(wrong) > len(turns):
        text = "%d of %d turns are no valid actions. One of them: %.200r. A (longer) warm start may help."
        logger.warning(text, len(wrong), len(turns), wrong[0])


def prompt_tokens(episode: Episode) -> int:
    """Count the tokens of the prompts of an episode's contexts."""
    return sum(len(context.prompt_ids) for context in episode.contexts)
