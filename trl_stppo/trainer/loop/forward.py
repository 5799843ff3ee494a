"""The forward passes of policy and critic: packs, or groups of rows of similar lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ...core.layout import Part, cut_rows, group_rows, put_back, row_spans, tail_width
from ...generation.cached import inference
from ...generation.slots import base_of, supports
from ...models.critic import Critic, SeparateCritic, SharedCritic
from ...rollout.episode import Context
from ...rollout.images import Image, ImageReader
from .._trl import replaced, small_tiles
from ..batch import Tokens, UpdateData, collate, full_sequence
from ..engine import engine_of
from ..shuffle import take_rows, without_padding
from .packed import IGNORED, Costs, Rows, images_of, mask_of, pack_logprobs

# Log-probabilities [B, T], entropies [B, T] and the router's loss []; the last two if requested.
Logprobs = tuple[Tensor, Tensor | None, Tensor | None]

# Cost of one more pass, in tokens. On an accelerator, launching the kernels of every layer and unpacking
# quantised weights takes about as long as this many more tokens.
PASS_OVERHEAD = {"cpu": 16.0}
ACCELERATOR_OVERHEAD = 512.0
# Largest allowed difference of packed and padded passes, relative to the largest value, by bytes per weight.
# The probe's tokens are improbable, so bfloat16 rounds their log-probabilities by 0.02.
TOLERANCE = {8: 1e-4, 4: 1e-4, 2: 0.06}
# Prompts and completions of the probe: rows with equal beginnings, a prefix of a row, another row.
PROBE = (((5, 6), (7, 8, 9, 6)), ((5, 6), (7, 3)), ((5, 6), (7, 8)), ((4,), (3, 3)))


@dataclass(eq=False, repr=False)
class ForwardPasses:
    """Computes log-probabilities and values; packs rows if packs cost less than padded rows.

    Attributes:
        hook: returns the present method for log-probabilities, an override if its function is not `own_hook`.
        multiple_of: widths of padded passes are multiples of it.
        why_padded: why no pass is packed, or None.
        was_packed: whether the last pass of `policy` was packed.
        reader: reads images; None if the policy reads only text.
    """

    accelerator: Any
    critic: Critic
    hook: Callable[[], Callable[..., Logprobs]]
    own_hook: Callable[..., Any]
    multiple_of: int | None
    reader: ImageReader | None = None
    why_padded: str | None = "It was not tried yet."
    was_packed: bool = False

    def __post_init__(self) -> None:
        self._engine = engine_of(self.accelerator)

    def probe(self, policy: Any, reference: Any, *, compiles: bool, has_aux: bool) -> None:
        """Decide whether passes may be packed: check the settings, then compare packed and padded passes."""
        critic = self.critic.model if isinstance(self.critic, SeparateCritic) else None
        self.why_padded = None
        if self._is_overridden:
            self.why_padded = "`_get_per_token_logps_and_entropies` is overridden."
        elif compiles:
            self.why_padded = "`torch_compile` compiles padded passes."
        elif has_aux:
            self.why_padded = "The router's loss is not a sum over tokens."
        for model in (m for m in (policy, reference, critic) if m is not None):
            # Unwrap the model, because an engine around a reference has its own configuration.
            self.why_padded = self.why_padded or supports(self.accelerator.unwrap_model(model))
        if self.why_padded is None and not self._engine.gathers:
            self.why_padded = self._difference(policy)

    @torch.no_grad()
    def _difference(self, policy: Any) -> str | None:
        """Return a description of differences between the probe's packed and padded passes, or None."""
        contexts = [Context(prompt_ids=[*a], ids=[*b], action_mask=[True] * len(b)) for a, b in PROBE]
        if self.reader is not None:
            # Two rows that differ only in their image, and a third row with the image of the second.
            one, other = self.reader.samples()
            for (a, b), image in zip(PROBE[:3], (one, one, other), strict=True):
                ids = [*a, *image.ids, *a]
                row = Context(prompt_ids=ids, ids=[*b], action_mask=[True] * len(b), images=[image])
                contexts.append(row)
        options: dict[str, Any] = {"pad_token_id": 0, "multiple_of": None, "has_logprobs": False}
        device, count = policy.get_input_embeddings().weight.device, len(contexts)
        sees = self.reader is not None
        batch = collate(contexts, device=device, hidden=[False] * count, sees=sees, **options)
        rows, plan = self._rows(batch), [[*range(count)]]
        try:
            # Autocast is off: its rounding would hide a small difference, and look like a large difference.
            with inference(policy), replaced(self.accelerator, autocast=nullcontext):
                packed = self._packed_logprobs(policy, rows, plan)[0]
                padded = self._padded(policy, batch)[0]
                gaps = [(packed - padded)[batch["completion_mask"].bool()] / padded.abs().max()]
            if isinstance(self.critic, SharedCritic | SeparateCritic):
                with inference(self.critic.model):
                    gaps.append(self._critic_gap(rows, plan[0], batch))
        except Exception as error:
            return f"A packed pass raises {type(error).__name__}: {error}"
        largest, limit = max(float(g.abs().max()) for g in gaps), TOLERANCE[policy.dtype.itemsize]
        return None if largest <= limit else f"Packed and padded passes differ by {largest:.1%}."

    def _critic_gap(self, rows: Rows, numbers: list[int], batch: Tokens) -> Tensor:
        """Return relative differences of the critic's last hidden states of packed and padded rows."""
        critic, pack = self.critic, rows.build(numbers)
        images = self._images(batch)
        own = [image for row in pack.rows for image in images[row]]
        ids, lengths = pack.input_ids[0], [len(own) for own in pack.places]
        table = nn.utils.rnn.pad_sequence([ids[own] for own in pack.places], batch_first=True)
        mask = torch.arange(table.size(1), device=ids.device) < ids.new_tensor(lengths)[:, None]
        with critic.active():
            seen = self._model_inputs(own, table)
            padded = critic.hidden_states(table, mask.long(), **seen)[mask]
            packed = critic.hidden_states(
                pack.input_ids, mask_of(pack, base_of(critic.model)), **rows.inputs(pack)
            )[0, torch.cat(pack.places)]
        return (packed - padded) / padded.abs().max()

    def policy(
        self,
        model: nn.Module,
        batch: Tokens,
        batch_size: int | None = None,
        *,
        entropy: bool = False,
        aux_loss: bool = False,
    ) -> Logprobs:
        """Return log-probabilities of a batch's tokens under a policy; packs give 0 for observations."""
        self.was_packed = False
        if self.why_padded is None and not self._is_overridden:
            rows = self._rows(batch)
            plan = rows.plan(self._costs(model), batch_size, equal=self._engine.counts_passes(model))
            self.was_packed = bool(plan)
            if plan:
                logprobs, entropies = self._packed_logprobs(model, rows, plan)
                return logprobs, entropies if entropy else None, None
        flags = {"compute_entropy": entropy, "compute_aux_loss": aux_loss}
        return self._padded(model, batch, batch_size=batch_size, **flags)

    def _padded(self, model: nn.Module, batch: Tokens, **options: Any) -> Logprobs:
        """Call the hook; an override gets the images of all rows by TRL's names."""
        ids, mask, length = self._sequence(batch)
        if self.reader is not None:
            images, own = self._images(batch), not self._is_overridden
            options |= {"images": images} if own else self.reader.upstream_inputs(images, ids)
        return self.hook()(model, ids, mask, length, **options)

    def _sequence(self, batch: Tokens) -> tuple[Tensor, Tensor, int]:
        """Return `full_sequence` without image tokens outside of the mask, because they have no image."""
        ids, mask, length = full_sequence(batch)
        if self.reader is not None:
            ids = ids.masked_fill((ids == self.reader.image_id) & (mask == 0), 0)
        return ids, mask, length

    def _images(self, batch: Tokens) -> list[list[Image]]:
        """Return the images of each row."""
        ids, mask, _ = self._sequence(batch)
        if self.reader is None:
            return [[]] * len(ids)
        rows = [row[kept].tolist() for row, kept in zip(ids, mask.bool(), strict=True)]
        return images_of(batch, rows, self.reader)

    def _model_inputs(self, images: Sequence[Image], ids: Tensor) -> dict[str, Tensor]:
        return {} if self.reader is None else self.reader.model_inputs(images, ids)

    @property
    def _is_overridden(self) -> bool:
        """Return whether the trainer overrides our method for log-probabilities."""
        return getattr(self.hook(), "__func__", None) is not self.own_hook

    def _rows(self, batch: Tokens) -> Rows:
        """Return the rows of a batch with their sampled tokens."""
        return Rows(batch, (batch["completion_mask"] * batch["tool_mask"]).bool(), self.reader)

    def _costs(self, model: nn.Module) -> Costs:
        causal = base_of(self.accelerator.unwrap_model(model))
        device = causal.get_input_embeddings().weight.device
        return Costs.of(causal, PASS_OVERHEAD.get(device.type, ACCELERATOR_OVERHEAD))

    def _packed_logprobs(
        self, model: nn.Module, rows: Rows, plan: list[list[int]]
    ) -> tuple[Tensor, Tensor | None]:
        """Return log-probabilities and entropies of wanted tokens, [B, T] each, with 0 elsewhere.

        The head of a reference model gives no entropies.
        """
        causal = base_of(self.accelerator.unwrap_model(model))
        ddp = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        packs, logprobs, entropies = list(map(rows.build, plan)), [], []
        for pack in packs:
            places, labels = rows.places(pack), pack.input_ids[0, rows.places(pack, after=1)]
            count = len(labels)
            if not count:
                # If no token has a label, make the pass anyway, because processes may communicate in every
                # pass.
                places, labels = labels.new_zeros(1), labels.new_full((1,), IGNORED)
            quiet = ddp.no_sync() if ddp is not None and pack is not packs[-1] else nullcontext()
            with quiet, small_tiles(places.device), self.accelerator.autocast():
                output = pack_logprobs(model, causal, pack, places, labels, **rows.inputs(pack))
            logprobs.append(output.log_probs[0, :count])
            if output.entropy is not None:
                entropies.append(output.entropy[0, :count])
        table = rows.put_back(packs, entropies) if entropies else None
        return rows.put_back(packs, logprobs), table

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
        images: list[list[Image]] | None = None,
        **given: Any,
    ) -> Logprobs:
        """Call upstream's `_get_per_token_logps_and_entropies` on at most `batch_size` rows at a time.

        `images` lists the images of each row. If an override passes `given`, upstream divides the rows.
        """
        # DDP expects gradients after the pass in which it communicates, so only the last pass communicates.
        # The router's loss is not a sum over rows, so it needs a single pass.
        ddp = model if isinstance(model, nn.parallel.DistributedDataParallel) else None
        flags = {"compute_entropy": compute_entropy, "compute_aux_loss": compute_aux_loss}
        if given:
            args = (model, input_ids, attention_mask, logits_to_keep, batch_size)
            return upstream(*args, **flags, **given)
        single = compute_aux_loss or self._engine.counts_passes(model)
        overhead = float("inf") if single else None
        parts = self.parts(input_ids, attention_mask, batch_size, overhead)
        width, results = input_ids.size(1), []
        for part in parts:
            keep = tail_width(part, width, logits_to_keep)
            quiet = ddp.no_sync() if ddp is not None and part is not parts[-1] else nullcontext()
            with quiet, small_tiles(input_ids.device):
                seen = {}
                if images is not None and self.reader is not None:
                    own = [images[row] for row in part.rows.tolist()]
                    seen = self.reader.upstream_inputs(own, part.input_ids)
                row = (model, part.input_ids, part.attention_mask, keep)
                results.append(upstream(*row, **flags, **seen))
        logprobs, entropies, aux_losses = map(list, zip(*results, strict=True))
        return (
            put_back(parts, logprobs, width, logits_to_keep),
            put_back(parts, entropies, width, logits_to_keep) if compute_entropy else None,
            torch.stack(aux_losses).mean() if compute_aux_loss else None,
        )

    def values(self, batch: Tokens, batch_size: int | None = None) -> Tensor:
        """Return the critic's values before each completion token and after the last column, [B, T + 1]."""
        sharded, packs = self._engine.shards, self.why_padded is None
        if packs and not sharded and (packed := self._packed_values(batch, batch_size)) is not None:
            return packed
        ids, mask, length = self._sequence(batch)
        parts = self.parts(ids, mask, batch_size, float("inf") if sharded else None)
        values, critic, images = [], self.critic, self._images(batch)
        for part in parts:
            keep = tail_width(part, ids.size(1), length + 1)
            own = [image for row in part.rows.tolist() for image in images[row]]
            seen = self._model_inputs(own, part.input_ids)
            row = (part.input_ids, part.attention_mask)
            with self._engine.autocast():
                values.append(critic.values(*row, keep - 1, **seen))
        return put_back(parts, values, ids.size(1), length + 1)

    def _packed_values(self, batch: Tokens, batch_size: int | None) -> Tensor | None:
        """Compute the result of `values` in packs; return None if padded passes cost less."""
        critic = self.critic
        # There is one more column than tokens, because the value after the last token is wanted too.
        wanted = nn.functional.pad(batch["completion_mask"], (1, 0), value=1).bool()
        rows, base = Rows(batch, wanted, self.reader), base_of(critic.model)
        costs, values = replace(self._costs(base), head=0.0), []
        packs = list(map(rows.build, rows.plan(costs, batch_size)))
        for pack in packs:
            with self._engine.autocast():
                mask = mask_of(pack, base)
                hidden = critic.hidden_states(pack.input_ids, mask, **rows.inputs(pack))
                values.append(critic.score(hidden[:, rows.places(pack)])[0])
        return rows.put_back(packs, values) if packs else None

    def pieces(self, inputs: UpdateData, size: int, *, has_aux: bool) -> list[UpdateData]:
        """Split a micro-batch into passes of at most `size` rows; the router's loss needs one pass."""
        rows = len(inputs["loss_mask"])
        if rows <= size or has_aux or self._engine.shards:
            return [inputs]
        numbers = torch.arange(rows, device=inputs["loss_mask"].device)
        return [without_padding(take_rows(inputs, part)) for part in numbers.split(size)]

    def parts(
        self, ids: Tensor, mask: Tensor, max_rows: int | None, overhead: float | None = None
    ) -> list[Part]:
        """Group the rows of a batch by length, at most `max_rows` per group."""
        if overhead is None:
            overhead = PASS_OVERHEAD.get(ids.device.type, ACCELERATOR_OVERHEAD)
        start, length = row_spans(mask)
        lengths: list[int] = length.tolist()
        multiple = self.multiple_of or 1
        parts = []
        for group in group_rows(lengths, max_rows=max_rows, overhead=overhead):
            # At least two columns are needed, because the first token of a row has no log-probability.
            width = max(2, max(lengths[row] for row in group))
            width = -(-width // multiple) * multiple
            rows = torch.tensor(group, device=ids.device)
            parts.append(cut_rows(ids, mask, rows, width, start, length))
        return parts
