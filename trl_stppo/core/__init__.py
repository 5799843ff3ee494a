"""The algorithm, as pure functions on tensors.

Needs torch and nothing else. Axes B episodes, T tokens, K turns, in this order; True in a mask
means "counts"; values under a False never reach a result or a gradient. Half precision goes in, float32
comes out. Wrong dtypes and shapes, and values outside of a documented range of settings, raise ValueError; on
a GPU too small a number of turns fails a device assertion. No function synchronises with the GPU.
"""

from trl_stppo.core.advantages import (
    GROUP_SCALES,
    default_lam,
    group_advantages,
    leave_one_out_advantages,
    return_batch_norm,
    token_gae,
    token_rewards,
    turn_gae,
    whiten,
)
from trl_stppo.core.joined import JoinedView
from trl_stppo.core.losses import (
    KL_ESTIMATORS,
    LOSS_TYPES,
    aggregation_weights,
    clipped_value_loss,
    kl_penalty,
)
from trl_stppo.core.masking import zero_off_mask
from trl_stppo.core.policy import (
    NORMALIZATION_MODES,
    RATIO_LEVELS,
    TOKEN_CLIPRANGE,
    ClippedSurrogate,
    SurrogateStats,
    clipped_surrogate,
    cosine,
    default_cliprange,
    importance_ratio,
    log_importance_ratio,
    logit_space_squares,
    normalization_scale,
    sampler_correction,
    winner_weights,
)
from trl_stppo.core.trust_region import Region, kl_per_turn
from trl_stppo.core.turns import (
    broadcast_turns,
    num_turns,
    reduce_turns,
    turn_ends,
    turn_index_from_spans,
    turn_starts,
)

__all__ = [
    "GROUP_SCALES",
    "KL_ESTIMATORS",
    "LOSS_TYPES",
    "NORMALIZATION_MODES",
    "RATIO_LEVELS",
    "TOKEN_CLIPRANGE",
    "ClippedSurrogate",
    "JoinedView",
    "Region",
    "SurrogateStats",
    "aggregation_weights",
    "broadcast_turns",
    "clipped_surrogate",
    "clipped_value_loss",
    "cosine",
    "default_cliprange",
    "default_lam",
    "group_advantages",
    "importance_ratio",
    "kl_penalty",
    "kl_per_turn",
    "leave_one_out_advantages",
    "log_importance_ratio",
    "logit_space_squares",
    "normalization_scale",
    "num_turns",
    "reduce_turns",
    "return_batch_norm",
    "sampler_correction",
    "token_gae",
    "token_rewards",
    "turn_ends",
    "turn_gae",
    "turn_index_from_spans",
    "turn_starts",
    "whiten",
    "winner_weights",
    "zero_off_mask",
]
