"""Scale factor of a policy update, from the norms of the gradient and of its clipping bias.

g is the gradient of the clipped objective, C that of the terms the clip removed (see
`losses.clipped_surrogate`), both over one optimizer step: all micro-batches, all processes,
all trainable policy parameters. The scale is a constant of the step; it carries no gradient. The
trainer decides what it multiplies (the gradient, or the optimizer's step).
"""

import math
from typing import overload

import torch
from torch import Tensor

from trl_stppo.core.masking import check_choice, check_float, check_like, check_mask, zero_off_mask

NORMALIZATION_MODES = ("none", "triggered", "share")

# "Nothing is clipped" means a norm up to this. Far below the rounding error of any gradient that
# moves a parameter (float32 keeps 7 digits, and Adam's own epsilon is 1e-8), and far above 1e-19,
# at which the squares inside a float32 norm start to vanish.
CLIP_BIAS_EPS = 1e-12


@overload
def normalization_scale(
    grad_norm: float, clip_bias_norm: float, mode: str, power: float = ..., *, eps: float = ...
) -> float: ...
@overload
def normalization_scale(
    grad_norm: Tensor, clip_bias_norm: Tensor, mode: str, power: float = ..., *, eps: float = ...
) -> Tensor: ...
def normalization_scale(
    grad_norm: float | Tensor,
    clip_bias_norm: float | Tensor,
    mode: str,
    power: float = 1.0,
    *,
    eps: float = CLIP_BIAS_EPS,
) -> float | Tensor:
    """Return the factor s by which the clipping-bias correction scales the gradient or the optimizer's step.

    With g = grad_norm and C = clip_bias_norm:

        none       1
        triggered  1 / C                 the paper's; needs gradient clipping behind it
        share      (g / (g + C))^power   never amplifies, unit-free, smooth

    and 1 in every mode if nothing is clipped (C <= eps, so 0 / 0 counts as 1), which holds exactly
    at the first step after a rollout. A norm that is not finite gives 1 as well, so that the
    trainer's guard still sees a gradient that is not finite.

    Args:
        grad_norm: number or float tensor of any shape, norm of g, >= 0.
        clip_bias_norm: number or float tensor of that shape, norm of C, >= 0, in the unit of grad_norm.
        mode: one of the above.
        power: exponent of "share", dimensionless, > 0; ignored by the other modes.
        eps: norm up to which nothing counts as clipped, in the unit of a gradient.

    Returns:
        s, dimensionless: a float for numbers, a detached tensor (in at least float32, computed
        without waiting for the device) if either norm is a tensor.

    Raises:
        ValueError: unknown `mode`, or `power` not positive and finite.

    Source: "triggered" is the clipping-triggered normalisation of arXiv:2511.20718v1 (Eqs. 7-8,
        as far as known), with a guard if nothing is clipped; "share" is this package's own
        signal. VCPO (arXiv:2602.17616) also scales the step by how far off policy a batch is; its
        signal is the effective sample size.
    """
    check_choice("mode", mode, NORMALIZATION_MODES)
    if not 0 < power < math.inf:
        raise ValueError(f"power must be a finite number > 0, got {power!r}")
    scale = _scale(_as_tensors(grad_norm, clip_bias_norm), mode, power, eps)
    return _like_inputs(scale, grad_norm, clip_bias_norm)


@overload
def cosine(dot: float, norm_a: float, norm_b: float) -> float: ...
@overload
def cosine(dot: Tensor, norm_a: Tensor, norm_b: Tensor) -> Tensor: ...
def cosine(dot: float | Tensor, norm_a: float | Tensor, norm_b: float | Tensor) -> float | Tensor:
    """Return the cosine of the angle between two vectors, from their inner product and norms.

    Args:
        dot: number or [] float tensor, inner product.
        norm_a: number or [] float tensor, norm of the first vector, >= 0.
        norm_b: number or [] float tensor, norm of the second vector, >= 0.

    Returns:
        In [-1, 1]; 0 if either vector is zero; NaN if an argument is. A float for numbers, a
        detached [] tensor if any argument is a tensor.
    """
    product, a, b = _as_tensors(dot, norm_a, norm_b)
    # Divide twice: the product of two small norms may underflow although neither norm does.
    value = torch.where((a == 0) | (b == 0), 0.0, product / a / b).clamp(-1.0, 1.0)
    return _like_inputs(value, dot, norm_a, norm_b)


def logit_space_squares(
    coefficient: Tensor, logprobs: Tensor, entropies: Tensor, loss_mask: Tensor
) -> Tensor:
    """Return the squared norm of each token's gradient with respect to its logits.

    A term with derivative c_t with respect to log p(y_t) has the gradient c_t (onehot(y_t) - p_t) in
    the logits of token t, whose squared norm is c_t^2 (1 - 2 p_y + sum_v p_v^2). The fused head keeps
    no table of probabilities, so exp(-entropy) replaces sum p^2. It is a lower bound, exact if p is
    uniform over its support. Sums over tokens treat these gradients as orthogonal.

    Only the ratio of two such norms carries over to the parameters behind the logits, and only as far
    as kept and clipped tokens are alike: `docs/algorithm.md` has the measured agreement.

    Args:
        coefficient: [B, T] float, c_t.
        logprobs: [B, T] float, log p(y_t), nats.
        entropies: [B, T] float, of p_t, nats.
        loss_mask: [B, T] bool, True = counts.

    Returns:
        [B, T] float, detached, in at least float32, 0 off the mask.

    Raises:
        ValueError: wrong dtypes, or shapes that differ from `loss_mask`'s.

    Source: the logit-gradient proxy 1 - 2 p + sum p^2 of OTB (arXiv:2602.07078); exp(-entropy) for
        sum p^2 is this package's own.
    """
    check_mask("loss_mask", loss_mask)
    tensors = {"coefficient": coefficient, "logprobs": logprobs, "entropies": entropies}
    check_float(**tensors)
    check_like("loss_mask", loss_mask, **tensors)
    wide = torch.promote_types(logprobs.dtype, torch.float32)
    chosen = zero_off_mask(logprobs.detach().to(wide), loss_mask).exp()
    collision = (-zero_off_mask(entropies.detach().to(wide), loss_mask)).exp()
    # The chosen token's own part is a lower bound, so that rounding cannot make it negative.
    per_token = torch.maximum(1.0 - 2.0 * chosen + collision, (1.0 - chosen).square())
    weight = zero_off_mask(coefficient.detach().to(wide), loss_mask).square()
    return weight * per_token


def _scale(norms: list[Tensor], mode: str, power: float, eps: float) -> Tensor:
    """Compute `normalization_scale` of checked scalar tensors."""
    g, c = norms
    one = torch.ones_like(c)
    if mode == "none":
        return one
    if mode == "triggered":
        scale = 1.0 / c
    else:
        # Halving is exact; the sum may overflow although neither norm does.
        scale = (0.5 * g / (0.5 * g + 0.5 * c)) ** power
    return torch.where((c > eps) & torch.isfinite(c) & torch.isfinite(g), scale, one)


def _as_tensors(*scalars: float | Tensor) -> list[Tensor]:
    """Convert numbers and tensors to detached [] tensors of one dtype and device; numbers give float64."""
    tensors = [x for x in scalars if isinstance(x, Tensor)]
    if not tensors:
        return [torch.tensor(x, dtype=torch.float64) for x in scalars]
    dtype, device = torch.float32, tensors[0].device
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return [torch.as_tensor(x, dtype=dtype, device=device).detach() for x in scalars]


def _like_inputs(result: Tensor, *scalars: float | Tensor) -> float | Tensor:
    """Return `result` as a tensor if any input is a tensor, else as a float."""
    return result if any(isinstance(x, Tensor) for x in scalars) else float(result)
