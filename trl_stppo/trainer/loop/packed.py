"""Forward passes of policy and critic over packs (`core.packing`): every token once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout import group_rows, row_spans
from ...core.packing import Pack, build_pack, plan_packs, shared_lengths
from ...generation.slots import attention_mask
from ...rollout.images import PLACE_BITS, Image, ImageReader
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
        # Count the language model alone, because tokens pass through nothing else. Matrices of quantised
        # weights, with two numbers per byte, look cheaper than they are.
        body = getattr(model.base_model, "language_model", model.base_model)
        weights = max(1, sum(p.numel() for p in body.parameters()) - table.numel())
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        factor = ATTENTION_COST.get(table.device.type, ACCELERATOR_ATTENTION_COST)
        attention = factor * 2 * width * config.num_hidden_layers
        return cls(attention / weights, config.vocab_size * config.hidden_size / weights, pass_)


class Rows:
    """The rows of a batch as lists of tokens.

    Attributes:
        rows: tokens of each row, without padding; image tokens as keys.
        columns: for each row [n] int64, the wanted columns of the completion.
        before: for each row [n] int64, positions in the row of the states before the wanted tokens.
    """

    def __init__(self, batch: Tokens, wanted: Tensor, reader: ImageReader | None = None) -> None:
        ids, mask, length = full_sequence(batch)
        self._device, self._shape = ids.device, wanted.shape
        starts, lengths = (part.tolist() for part in row_spans(mask))
        spans, first = list(zip(starts, lengths, strict=True)), ids.size(1) - length
        self.rows = [row[a : a + n] for row, (a, n) in zip(ids.tolist(), spans, strict=True)]
        columns = [row.nonzero()[:, 0] for row in wanted.cpu()]
        # Drop the first token of a row, because it has no state before it.
        self.columns = [c[c + first > a] for c, a in zip(columns, starts, strict=True)]
        self.before = [c + (first - a - 1) for c, a in zip(self.columns, starts, strict=True)]
        self._reader = reader
        if reader is not None:
            self._see(reader, images_of(batch, self.rows, reader))

    def _see(self, reader: ImageReader, images: list[list[Image]]) -> None:
        """Replace image tokens by keys, so that only rows with the same image share its tokens."""
        self._images = sorted({image for own in images for image in own}, key=lambda i: i.key)
        numbers = {image: number for number, image in enumerate(self._images)}
        pairs = list(zip(self.rows, images, strict=True))
        self._axes = [reader.positions(row, own) for row, own in pairs]
        self.rows = [reader.keys(row, own, numbers.__getitem__) for row, own in pairs]

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
        built = build_pack(self.rows, pack, self._device)
        if self._reader is None:
            return built
        keys, image_id = built.input_ids, self._reader.image_id
        axes: Tensor | None = None
        firsts = [n << PLACE_BITS | i.ids.index(image_id) for n, i in enumerate(self._images)]
        begins = {-1 - first: image for first, image in zip(firsts, self._images, strict=True)}
        images = [begins[key] for key in keys[0].tolist() if key in begins]
        positions = [self._axes[row] for row in built.rows]
        for places, row in zip(built.places, positions, strict=True):
            if row is not None:
                axes = row.new_zeros(len(row), 1, keys.size(1)) if axes is None else axes
                axes[:, 0, places.cpu()] = row
        ids = keys.masked_fill(keys < 0, image_id)
        axes = None if axes is None else axes.to(self._device)
        return built._replace(input_ids=ids, images=images, axes=axes)

    def inputs(self, pack: Pack) -> dict[str, Tensor]:
        """Return the positions of a pack's tokens and its images, as models take them."""
        positions = pack.position_ids if pack.axes is None else pack.axes
        seen = {} if self._reader is None else self._reader.joined(pack.images, self._device)
        return {"position_ids": positions, **seen}


def images_of(batch: Tokens, rows: Sequence[list[int]], reader: ImageReader) -> list[list[Image]]:
    """Return the images of each row of a batch, without the images of hidden completions."""
    found = []
    for keys, row in zip(batch["images"].tolist(), rows, strict=True):
        images, tokens = reader.of_keys(keys), row.count(reader.image_id)
        ends = accumulate(image.tokens for image in images)
        found.append([image for image, end in zip(images, ends, strict=True) if end <= tokens])
        reader.extents(row, found[-1])
    return found


def mask_of(pack: Pack, model: Any) -> Any:
    """Return a pack's attention mask in the model's form."""
    positions = pack.position_ids[:, None]
    distance = positions[..., None] - positions[..., None, :]
    return attention_mask(model, pack.attends, distance)


def pack_logprobs(model: Any, causal: Any, pack: Pack, places: Tensor, labels: Tensor, **inputs: Any) -> Any:
    """Run a pack through a policy with TRL's fused head; return the head's outputs, [1, M] each.

    `model` wraps `causal`; `places` are positions of the states that predict the tokens `labels`, [M] each;
    `inputs`: see `Rows.inputs`.
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
            **inputs,
            shift_labels=labels[None],
            fused_lm_head=True,
        )
    finally:
        handle.remove()
