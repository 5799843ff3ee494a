"""A copy of the policy that samples turns during training. It shares the policy's frozen weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from .cached import inference

# Attributes of a module that hold its forward pass, bound to that module (TRL's fused head, autocast), and
# accelerate's mark that the forward pass is wrapped.
PATCHES = ("forward", "_original_forward", "_is_accelerate_prepared")


class PolicyCopy:
    """Copy of the policy, with the trained weights of the last `refresh`.

    Args:
        policy: unwrapped, as it samples.
        trained: its parameters that are trained and sample; they alone are copied.
        prepare: gives the copy the precision of the policy's forward pass.
    """

    def __init__(
        self,
        policy: nn.Module,
        trained: Iterable[nn.Parameter],
        prepare: Callable[[nn.Module], nn.Module],
    ) -> None:
        own = {id(parameter): parameter for parameter in trained}
        shared = (t for part in (policy.parameters(), policy.buffers()) for t in part)
        memo: dict[int, object] = {id(tensor): tensor for tensor in shared if id(tensor) not in own}
        # Frozen weights of 8 bits lie in a plain attribute of bitsandbytes' layers.
        plain = (getattr(module, "state", None) for module in policy.modules())
        states = (getattr(state, "__dict__", {}) for state in plain)
        memo |= {id(t): t for state in states for t in state.values() if isinstance(t, Tensor)}
        model = copy.deepcopy(policy, memo)
        for module in model.modules():
            for name in PATCHES:
                vars(module).pop(name, None)
        prepared = prepare(model)
        # Turns are sampled with the uncompiled module.
        self.model = getattr(prepared, "_orig_mod", prepared)
        self._policy = policy
        pairs = [(memo.get(key), parameter) for key, parameter in own.items()]
        self._pairs = [(mine, theirs) for mine, theirs in pairs if isinstance(mine, Tensor)]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the policy's trained weights into this copy."""
        for mine, theirs in self._pairs:
            mine.copy_(theirs)

    @torch.no_grad()
    def why_unfit(self) -> str | None:
        """Return why the copy cannot sample in the policy's place, or None if it can."""
        self.refresh()
        policy, mine = self._logits(self._policy), self._logits(self.model)
        if not torch.allclose(mine, policy, rtol=1e-3, atol=1e-3 * float(policy.std())):
            return "gives other logits"
        for tensor, _ in self._pairs:
            tensor.mul_(1.5).add_(0.1)
        moved = self._logits(self.model)
        self.refresh()
        return "uses the weights in training" if torch.equal(moved, mine) else None

    def _logits(self, model: nn.Module) -> Tensor:
        device = next(model.parameters()).device
        with inference(model):
            output = model(input_ids=torch.arange(1, 9, device=device)[None], use_cache=False)
        logits: Tensor = output.logits
        return logits.float()
