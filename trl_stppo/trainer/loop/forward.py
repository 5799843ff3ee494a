"""The forward passes of policy and critic, on groups of rows of similar lengths to save padding."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout import Part, cut_rows, group_rows, put_back, row_spans, tail_width
from .._trl import small_tiles
from ..batch import Batch, full_sequence
from ..bridge import Bridge
from ..sharding import runtime

# Log-probabilities [B, T], entropies [B, T] and the router's loss []; the last two if requested.
Logprobs = tuple[Tensor, Tensor | None, Tensor | None]

# Cost of one more pass, in tokens: launching the kernels of every layer, and unpacking quantised weights,
# takes an accelerator about as long as this many more tokens.
PASS_OVERHEAD = {"cpu": 16.0}
ACCELERATOR_OVERHEAD = 512.0


class ForwardPasses:
    """Computes log-probabilities and values of groups of rows of similar lengths."""

    def __init__(self, host: Bridge) -> None:
        self._host = host

    def logprobs(
        self,
        upstream: Callable[..., Any],
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **images: Any,
    ) -> Logprobs:
        """Call upstream's `_get_per_token_logps_and_entropies` on at most `batch_size` rows at a time."""
        # There is one group if the router's loss is not a sum over rows, or if an engine communicates in
        # every pass, because processes may differ in their number of groups. DDP communicates in the last
        # pass, after which it expects gradients. If it searches for unused weights (experts without a
        # token), it counts only that pass.
        ddp = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        single = compute_aux_loss or runtime.is_sharded(self._host.accelerator)
        single = single or (ddp is not None and (ddp.find_unused_parameters or ddp.static_graph))
        overhead = float("inf") if single else None
        parts = self.parts(input_ids, attention_mask, batch_size, overhead)
        width, logprobs, entropies, aux_losses = input_ids.size(1), [], [], []
        for part in parts:
            keep = tail_width(part, width, logits_to_keep)
            quiet = ddp.no_sync() if ddp is not None and part is not parts[-1] else nullcontext()
            with quiet, small_tiles(input_ids.device):
                part_logprobs, entropy, aux_loss = upstream(
                    model,
                    part.input_ids,
                    part.attention_mask,
                    keep,
                    compute_entropy=compute_entropy,
                    compute_aux_loss=compute_aux_loss,
                )
            logprobs.append(part_logprobs)
            entropies.append(entropy)
            aux_losses.append(aux_loss)
        return (
            put_back(parts, logprobs, width, logits_to_keep),
            put_back(parts, entropies, width, logits_to_keep) if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    def values(self, batch: Batch, batch_size: int | None = None) -> Tensor:
        """Return the critic's values before each completion token and after the last column, [B, T + 1]."""
        ids, mask, length = full_sequence(batch)
        overhead = float("inf") if runtime.is_sharded(self._host.accelerator) else None
        parts = self.parts(ids, mask, batch_size, overhead)
        values = []
        for part in parts:
            keep = tail_width(part, ids.size(1), length + 1)
            with runtime.autocast(self._host.accelerator):
                critic = self._host.critic
                values.append(critic.values(part.input_ids, part.attention_mask, keep - 1))
        return put_back(parts, values, ids.size(1), length + 1)

    def parts(
        self, ids: Tensor, mask: Tensor, max_rows: int | None, overhead: float | None = None
    ) -> list[Part]:
        """Group the rows of a batch by length, at most `max_rows` per group."""
        if overhead is None:
            overhead = PASS_OVERHEAD.get(ids.device.type, ACCELERATOR_OVERHEAD)
        start, length = row_spans(mask)
        lengths: list[int] = length.tolist()
        multiple = self._host.pad_to_multiple_of or 1
        parts = []
        for group in group_rows(lengths, max_rows=max_rows, overhead=overhead):
            # Two columns at least: the first token of a row has no log-probability.
            width = max(2, max(lengths[row] for row in group))
            width = -(-width // multiple) * multiple
            rows = torch.tensor(group, device=ids.device)
            parts.append(cut_rows(ids, mask, rows, width, start, length))
        return parts
