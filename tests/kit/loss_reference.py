"""The policy's loss again, token by token, for the trainer tests; shares no code with the package.

Autograd on a second copy of the model, over plain loops that know nothing of kept and clipped terms:
C is the gradient of the unclipped objective minus that of the clipped one.
"""

import torch
from torch import Tensor

from tests.kit.fakes import char_tokenizer, float64_policy
from tests.kit.scripted import plain_logprobs


def log_ratios(new: Tensor, old: Tensor, turn: Tensor, level: str) -> list[Tensor]:
    """Per agent token of one episode, at the level asked for."""
    result = []
    for t in range(len(new)):
        if level == "token":
            result.append(new[t] - old[t])
        else:
            members = [u for u in range(len(new)) if turn[u] == turn[t]]
            result.append(sum(new[u] - old[u] for u in members) / len(members))
    return result


def share_of_token(loss_type: str, lengths: list[int], episode: int, budget: int) -> float:
    return {
        "grpo": 1 / len(lengths) / lengths[episode],
        "bnpo": 1 / sum(lengths),
        "dapo": 1 / sum(lengths),
        "dr_grpo": 1 / len(lengths) / budget,
    }[loss_type]


class LossReference:
    """Gradients of every term of the policy's loss for one recorded mini-batch, token by token.

    `weights` are the policy's at that step, by name; default: those it starts with.
    """

    def __init__(
        self,
        batch: dict[str, Tensor],
        level: str = "token",
        loss_type: str = "grpo",
        budget: int = 64,
        kl_times_ratio: bool = True,
        weights: dict[str, Tensor] | None = None,
    ) -> None:
        self.model = float64_policy(char_tokenizer()).eval()
        self.model.load_state_dict(weights or {}, strict=weights is not None)
        self.parameters = dict(self.model.named_parameters())
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
        length = batch["completion_ids"].size(1)
        new, entropies = plain_logprobs(self.model, ids, mask, length)
        self.logprobs, self.entropies = new, entropies
        lengths = batch["loss_mask"].sum(dim=1).tolist()
        self.kl = self.entropy = 0.0
        # Of each episode; the tests weigh them.
        self.clipped_of, self.unclipped_of = [0.0] * len(ids), [0.0] * len(ids)
        for b in range(len(ids)):
            # Agent tokens only; the rest must not matter.
            rows = [t for t in range(length) if batch["turn_index"][b, t] >= 0]
            share = share_of_token(loss_type, lengths, b, budget)
            old, turn = batch["old_per_token_logps"][b, rows], batch["turn_index"][b, rows]
            for t, log_ratio in zip(rows, log_ratios(new[b, rows], old, turn, level), strict=True):
                ratio, advantage = log_ratio.exp(), batch["advantages"][b, t]
                bounded = ratio.clamp(0.8, 1.2) * advantage
                self.unclipped_of[b] += share * ratio * advantage
                self.clipped_of[b] += share * torch.minimum(ratio * advantage, bounded)
                difference = batch["ref_per_token_logps"][b, t] - new[b, t]
                k3 = difference.exp() - difference - 1
                self.kl = self.kl + share * k3 * (ratio if kl_times_ratio else 1)
                self.entropy = self.entropy + entropies[b, t] / sum(lengths)
        self.clipped, self.unclipped = sum(self.clipped_of), sum(self.unclipped_of)

    def grad(self, objective: Tensor) -> dict[str, Tensor]:
        grads = torch.autograd.grad(objective, list(self.parameters.values()), retain_graph=True)
        return dict(zip(self.parameters, grads, strict=True))

    @property
    def g(self) -> dict[str, Tensor]:
        return self.grad(self.clipped)

    @property
    def bias(self) -> dict[str, Tensor]:
        g, total = self.g, self.grad(self.unclipped)
        return {name: total[name] - g[name] for name in g}
