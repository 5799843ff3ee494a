"""Place scores, turn rewards and the KL penalty of an episode on its tokens."""

from torch import Tensor

from trl_stppo.core.masking import (
    check_float,
    check_like,
    check_shape,
    check_turn_columns,
    check_turn_index,
    upcast,
    zero_off_mask,
)
from trl_stppo.core.turns import broadcast_turns, num_turns, turn_ends


def token_rewards(
    turn_index: Tensor,
    *,
    scores: Tensor,
    turn_rewards: Tensor | None = None,
    kl: Tensor | None = None,
    kl_coef: float = 0.0,
) -> Tensor:
    """Return the reward of every token.

        r_t = -kl_coef KL_t  +  turn k's reward if t is the last token of turn k
                             +  the score if t is the last token of the last turn

    Args:
        turn_index: [B, T] int64, k inside turn k, -1 elsewhere.
        scores: [B] float, reward units; the episode's outcome.
        turn_rewards: [B, K] float, reward units, from the environment; any value for turns that an
            episode does not have. Default: none.
        kl: [B, T] float, nats per token, against the reference policy (`losses.kl_penalty`).
            Default: none.
        kl_coef: reward units per nat.

    Returns:
        [B, T] float, reward units; 0 outside turns, hence 0 everywhere (its score too) for an
        episode without turns. Float32 for half precision input.

    Raises:
        ValueError: wrong dtypes, or shapes that do not fit `turn_index` (on a GPU too few columns fail
            a device assertion instead, because the check would synchronise).

    Source: arXiv:2511.20718v1 (outcome reward at the end, turn-level MDP); the KL inside the reward
        as in arXiv:2203.02155, Eq. 2.
    """
    check_turn_index(turn_index)
    check_float(scores=scores)
    check_shape("scores", scores, turn_index.shape[:1], "one per episode, [B]")
    ends = turn_ends(turn_index)
    is_final = ends & (turn_index == (num_turns(turn_index) - 1).unsqueeze(1))
    rewards = zero_off_mask(upcast(scores).unsqueeze(1), is_final)
    if turn_rewards is not None:
        check_float(turn_rewards=turn_rewards)
        check_turn_columns("turn_rewards", turn_rewards, turn_index)
        rewards = rewards + zero_off_mask(broadcast_turns(upcast(turn_rewards), turn_index), ends)
    if kl is not None:
        check_float(kl=kl)
        check_like("turn_index", turn_index, kl=kl)
        rewards = rewards - kl_coef * zero_off_mask(upcast(kl), turn_index >= 0)
    return rewards
