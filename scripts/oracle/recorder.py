"""Reads the numbers of an update from a running ``PPOTrainer.train`` of TRL 1.12."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

# Local variables of `PPOTrainer.train` by the name they are stored under.
ROLLOUT = {
    "query_ids": "queries",
    "response_ids": "responses",
    "logprobs": "logprobs",
    "ref_logprobs": "ref_logprobs",
    "kl": "kl",
    "non_score_reward": "non_score_reward",
    "rewards": "rewards",
    "returns": "returns",
    "advantages": "advantages",
    "values": "values",
    "scores": "scores",
}
STEP = ("new_logprobs", "ratio", "vpred", "pg_loss", "vf_loss", "loss", "vf_clipfrac")


class UpdateDoneError(Exception):
    """Ends the upstream training loop after its first update."""


def _train_locals() -> dict[str, Any]:
    """Returns the local variables of the ``PPOTrainer.train`` call this is called from."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if code.co_name == "train" and code.co_filename.endswith("ppo_trainer.py"):
            return frame.f_locals
        frame = frame.f_back
    raise RuntimeError("Not called from PPOTrainer.train.")


class Recorder:
    """Collects tensors of one run under flat names.

    Args:
        policy: Policy under training.
        value: Value model under training.
    """

    def __init__(self, policy: nn.Module, value: nn.Module) -> None:
        self.models = {"policy": policy, "value": value}
        self.tensors: dict[str, Tensor] = {}
        self.steps = 0

    def put(self, name: str, tensor: Tensor) -> None:
        """Stores a copy of ``tensor``."""
        self.tensors[name] = tensor.detach().clone().contiguous()

    def before_step(self, *_: Any) -> None:
        """Stores losses and gradients; a pre-hook of the optimizer."""
        self.steps += 1
        prefix = f"step{self.steps}"
        local = _train_locals()
        for name in STEP:
            self.put(f"{prefix}/{name}", local[name])
        self.put(f"{prefix}/indices", torch.as_tensor(local["micro_batch_inds"]))
        for kind, model in self.models.items():
            for name, parameter in model.named_parameters():
                self.put(f"{prefix}/grad/{kind}/{name}", parameter.grad)

    def after_step(self, *_: Any) -> None:
        """Stores the new weights; a post-hook of the optimizer."""
        for kind, model in self.models.items():
            for name, parameter in model.named_parameters():
                self.put(f"step{self.steps}/after/{kind}/{name}", parameter)

    def end_of_update(self) -> None:
        """Stores the rollout and ends the training; called from a trainer callback."""
        local = _train_locals()
        tokenizer = local["processing_class"]
        if local["padding_mask"].any() or (local["responses"] == tokenizer.eos_token_id).any():
            raise RuntimeError("A response contains EOS or padding; choose another --seed.")
        for name, source in ROLLOUT.items():
            self.put(name, local[source])
        self.put("query_mask", local["queries"] != tokenizer.pad_token_id)
        for step in range(self.steps):
            self.put(f"step{step + 1}/pg_clipfrac", local["pg_clipfrac_stats"][step, 0, 0])
        raise UpdateDoneError


@contextmanager
def spy_on_whitening(module: ModuleType, recorder: Recorder) -> Iterator[None]:
    """Records the advantages that go into upstream's ``masked_whiten``.

    Args:
        module: Upstream's ``ppo_trainer`` module.
        recorder: Where to store them.
    """
    original = module.masked_whiten

    def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
        if shift_mean:  # the rewards would be whitened with shift_mean=False
            recorder.put("advantages_raw", values)
        return original(values, mask, shift_mean)

    module.masked_whiten = masked_whiten
    try:
        yield
    finally:
        module.masked_whiten = original
