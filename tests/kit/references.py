"""The algorithm again, as plain loops over Python floats (float64), written from the formulas.

Shares no code with `trl_stppo.core` and knows no tensors: rows are lists, masks lists of bools,
`turn_index` lists of ints with -1 outside turns. Entries that do not count are never read.
"""

import math


def turn_index(spans, length):
    rows = []
    for turns in spans:
        row = [-1] * length
        for k, (start, end) in enumerate(turns):
            for t in range(start, end):
                row[t] = k
        rows.append(row)
    return rows


def turns_of_mask(mask):
    """Turn index in which each run of True is a turn."""
    rows = []
    for flags in mask:
        starts = [flag and not before for before, flag in zip([False, *flags], flags, strict=False)]
        rows.append([sum(starts[: t + 1]) - 1 if flag else -1 for t, flag in enumerate(flags)])
    return rows


def tokens_of(row, k):
    return [t for t, index in enumerate(row) if index == k]


def count_turns(row):
    return max(row, default=-1) + 1


def log_ratio(logprobs, old_logprobs, index, level, loss_mask=None):
    out = []
    for b, row in enumerate(index):
        counts = [t for t, k in enumerate(row) if k >= 0 and (loss_mask is None or loss_mask[b][t])]
        d = {t: logprobs[b][t] - old_logprobs[b][t] for t in counts}
        values = [0.0] * len(row)
        for t in counts:
            if level == "token":
                group = [t]
            elif level == "turn":
                group = [s for s in counts if row[s] == row[t]]
            else:
                group = counts
            values[t] = sum(d[s] for s in group) / len(group)
        out.append(values)
    return out


def token_gae(rewards, values, action_mask, gamma, lam, bootstrap=None):
    advantages, returns = [], []
    for b, mask in enumerate(action_mask):
        adv, ret = [0.0] * len(mask), [0.0] * len(mask)
        next_value = bootstrap[b] if bootstrap is not None else 0.0
        next_advantage = 0.0
        for t in reversed(range(len(mask))):
            if not mask[t]:
                continue
            delta = rewards[b][t] + gamma * next_value - values[b][t]
            adv[t] = delta + gamma * lam * next_advantage
            ret[t] = adv[t] + values[b][t]
            next_value, next_advantage = values[b][t], adv[t]
        advantages.append(adv)
        returns.append(ret)
    return advantages, returns


def turn_gae(rewards, values, index, gamma, lam, bootstrap=None):
    advantages, returns = [], []
    for b, row in enumerate(index):
        adv, ret = [0.0] * len(row), [0.0] * len(row)
        next_value = bootstrap[b] if bootstrap is not None else 0.0
        next_advantage = 0.0
        for k in reversed(range(count_turns(row))):
            tokens = tokens_of(row, k)
            value = values[b][tokens[0]]
            reward = sum(rewards[b][t] for t in tokens)
            advantage = reward + gamma * next_value - value + gamma * lam * next_advantage
            for t in tokens:
                adv[t] = advantage
            ret[tokens[0]] = advantage + value
            next_value, next_advantage = value, advantage
        advantages.append(adv)
        returns.append(ret)
    return advantages, returns


def return_batch_norm(rewards, index, counts, gamma):
    returns = []
    for b, row in enumerate(index):
        ahead, own = 0.0, {}
        for k in reversed(range(count_turns(row))):
            ahead = sum(rewards[b][t] for t in tokens_of(row, k)) + gamma * ahead
            if any(counts[b][t] for t in tokens_of(row, k)):
                own[k] = ahead
        returns.append(own)
    every = [g for own in returns for g in own.values()]
    mean = sum(every) / len(every) if every else 0.0
    deviation = math.sqrt(sum((g - mean) ** 2 for g in every) / len(every)) if every else 0.0
    return [
        [
            (returns[b][k] - mean) / (deviation + 1e-9) if k >= 0 and counts[b][t] else 0.0
            for t, k in enumerate(row)
        ]
        for b, row in enumerate(index)
    ]


def leave_one_out(scores, counts):
    out = []
    for row, mask in zip(scores, counts, strict=True):
        advantages = []
        for i, score in enumerate(row):
            others = [s for j, s in enumerate(row) if mask[j] and j != i]
            paid = mask[i] and others
            advantages.append(score - sum(others) / len(others) if paid else 0.0)
        out.append(advantages)
    return out


def whiten(x, mask, center=True):
    counted = [v for row, m in zip(x, mask, strict=True) for v, c in zip(row, m, strict=True) if c]
    n = len(counted)
    mean = sum(counted) / n if n else 0.0
    variance = sum((v - mean) ** 2 for v in counted) / (n - 1) if n > 1 else 0.0
    scale = 1.0 / math.sqrt(variance + 1e-8)
    shift = 0.0 if center else mean
    return [
        [(v - mean) * scale + shift if c else 0.0 for v, c in zip(row, m, strict=True)]
        for row, m in zip(x, mask, strict=True)
    ]


def token_rewards(index, scores, turn_rewards=None, kl=None, kl_coef=0.0):
    out = []
    for b, row in enumerate(index):
        rewards = [0.0] * len(row)
        if kl is not None:
            for t, k in enumerate(row):
                if k >= 0:
                    rewards[t] -= kl_coef * kl[b][t]
        for k in range(count_turns(row)):
            last = tokens_of(row, k)[-1]
            if turn_rewards is not None:
                rewards[last] += turn_rewards[b][k]
            if k == count_turns(row) - 1:
                rewards[last] += scores[b]
        out.append(rewards)
    return out


def kl_penalty(logprob, ref_logprob, estimator):
    x = ref_logprob - logprob
    held = min(x, 20.0)
    return -x if estimator == "k1" else math.exp(held) - 1.0 - held


def objective(ratio, advantage, low, high, delta=math.inf):
    """The usual min/clip objective of one token."""
    clipped_ratio = min(max(ratio, 1.0 - low), 1.0 + high)
    return min(min(ratio, delta) * advantage, clipped_ratio * advantage)


def is_clipped(ratio, advantage, low, high, delta=math.inf):
    if advantage > 0:
        return ratio > 1.0 + high
    if advantage < 0:
        return ratio < 1.0 - low or ratio > delta
    return False


def value_loss(value, old_value, target, cliprange):
    error = (value - target) ** 2
    if cliprange is None:
        return 0.5 * error, False
    moved = min(max(value, old_value - cliprange), old_value + cliprange)
    clipped_error = (moved - target) ** 2
    return 0.5 * max(error, clipped_error), clipped_error > error


def aggregate(per_token, loss_mask, loss_type, num_episodes, num_tokens, max_length=None):
    """The aggregated loss itself, of these rows."""
    total = 0.0
    for row, mask in zip(per_token, loss_mask, strict=True):
        counted = [v for v, c in zip(row, mask, strict=True) if c]
        if not counted:
            continue
        if loss_type == "grpo":
            total += sum(counted) / len(counted) / num_episodes
        elif loss_type in ("bnpo", "dapo"):
            total += sum(counted) / num_tokens
        elif loss_type == "dr_grpo":
            total += sum(counted) / max_length / num_episodes
    return total


def scale(g, c, mode, eps=1e-12):
    if c <= eps:
        return 1.0
    if mode == "triggered":
        return 1.0 / c
    return g / (g + c)
