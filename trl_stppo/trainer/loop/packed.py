"""Forward passes of policy and critic over packs (`core.packing`): every token once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout import group_rows, row_spans
from ...core.packing import Pack, build_pack, plan_packs, shared_lengths
from ...generation.slots import attention_mask
from ..batch import Tokens, full_sequence

# Cost of an operation of masked attention, relative to an operation of a matrix product. The CPU's cost was
# measured with SmolLM2-135M at 1,000 to 4,000 tokens.
ATTENTION_COST = {"cpu": 2.5}
ACCELERATOR_ATTENTION_COST = 3.0
# Label of a state that predicts no token.
IGNORED = -100


@dataclass(frozen=True)
class Costs:
    """Costs of a model's passes, in units of one token's matrix products in all layers.

    Attributes:
        quadratic: cost of attention between two tokens.
        head: cost of projecting one state by the head.
        pass_: cost of one more pass.
    """

    quadratic: float
    head: float
    pass_: float

    @classmethod
    def of(cls, model: Any, pass_: float) -> Costs:
        """Derive the costs from a causal model's shapes."""
        config = model.config.get_text_config()
        table = model.get_input_embeddings().weight
        # Quantised weights hold two numbers per byte, which makes matrices look cheaper than they are.
        weights = max(1, sum(p.numel() for p in model.base_model.parameters()) - table.numel())
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        factor = ATTENTION_COST.get(table.device.type, ACCELERATOR_ATTENTION_COST)
        attention = factor * 2 * width * config.num_hidden_layers
        return cls(attention / weights, config.vocab_size * config.hidden_size / weights, pass_)


class Rows:
    """The rows of a batch as lists of tokens.

    Attributes:
        rows: tokens of each row, without padding.
        columns: for each row [n] int64, the wanted columns of the completion.
        before: for each row [n] int64, positions in the row of the states before the wanted tokens.
    """

    def __init__(self, batch: Tokens, wanted: Tensor) -> None:
        ids, mask, length = full_sequence(batch)
        self._device, self._shape = ids.device, wanted.shape
        starts, lengths = (part.tolist() for part in row_spans(mask))
        spans, first = list(zip(starts, lengths, strict=True)), ids.size(1) - length
        self.rows = [row[a : a + n] for row, (a, n) in zip(ids.tolist(), spans, strict=True)]
        columns = [row.nonzero()[:, 0] for row in wanted.cpu()]
        # Drop the first token of a row, because it has no state before it.
        self.columns = [c[c + first > a] for c, a in zip(columns, starts, strict=True)]
        self.before = [c + (first - a - 1) for c, a in zip(self.columns, starts, strict=True)]

    def plan(self, costs: Costs, max_rows: int | None, *, equal: bool = False) -> list[list[int]]:
        """Divide the rows into packs; return no pack if the padded passes cost less.

        `max_rows`: largest number of rows of a padded pass; its tokens also limit a pack. `equal`: make
        packs of `max_rows` rows each, because processes that communicate in every pass need equal numbers.
        """
        lengths = list(map(len, self.rows))
        size = max_rows or len(lengths)
        if equal:
            order, _ = shared_lengths(self.rows)
            return [order[n : n + size] for n in range(0, len(order), size)]
        packs, cost = plan_packs(
            self.rows,
            max_tokens=size * max(lengths),
            quadratic=costs.quadratic,
            overhead=costs.pass_,
        )
        padded, everywhere = 0.0, self._device.type == "cpu"
        for group in group_rows(lengths, max_rows=max_rows, overhead=costs.pass_):
            width = max(lengths[row] for row in group)
            padded += len(group) * (width + costs.quadratic * width**2) + costs.pass_
            # On a CPU, TRL's head projects padding and prompt too.
            padded += everywhere * costs.head * len(group) * width
        cost += everywhere * costs.head * sum(map(len, self.columns))
        return packs if cost <= padded else []

    def places(self, pack: Pack, *, after: int = 0) -> Tensor:
        """Return the pack positions, plus `after`, of the states that predict wanted tokens, [M]."""
        found = [
            own[(self.before[row] + after).to(own.device)]
            for row, own in zip(pack.rows, pack.places, strict=True)
        ]
        return torch.cat(found)

    def put_back(self, packs: list[Pack], outputs: list[Tensor]) -> Tensor:
        """Put outputs of wanted tokens, [M] of each pack, into a table [B, T]; its other entries are 0."""
        order = [row for pack in packs for row in pack.rows]
        rows = torch.cat([torch.full_like(self.columns[row], row) for row in order])
        columns = torch.cat([self.columns[row] for row in order])
        places = (rows.to(self._device), columns.to(self._device))
        found = torch.cat(outputs)
        return found.new_zeros(self._shape).index_put(places, found)

    def build(self, pack: list[int]) -> Pack:
        """Build a pack of the rows `pack`."""
        return build_pack(self.rows, pack, self._device)


def mask_of(pack: Pack, model: Any) -> Any:
    """Return a pack's attention mask in the model's form."""
    positions = pack.position_ids[:, None]
    distance = positions[..., None] - positions[..., None, :]
    return attention_mask(model, pack.attends, distance)


def pack_logprobs(model: nn.Module, causal: Any, pack: Pack, places: Tensor, labels: Tensor) -> Any:
    """Run a pack through a policy with TRL's fused head; return the head's outputs, [1, M] each.

    `model` wraps `causal`; `places` are positions of the states that predict the tokens `labels`, [M] each.
    """

    def gather(module: nn.Module, args: Any, output: Any) -> Any:
        """Keep only the states at `places`, which the head then projects."""
        states = output.last_hidden_state
        output.last_hidden_state = states[:, places.to(states.device)]
        return output

    handle = causal.base_model.register_forward_hook(gather)
    try:
        return model(
            input_ids=pack.input_ids,
            attention_mask=mask_of(pack, causal),
            position_ids=pack.position_ids,
            shift_labels=labels[None],
            fused_lm_head=True,
        )
    finally:
        handle.remove()
