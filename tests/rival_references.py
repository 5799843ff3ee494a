"""The study's corrections again, as plain loops over Python floats, written from the formulas.

Rows are lists, `index` lists of ints with -1 outside turns.
"""

import math

from tests.references import count_turns, tokens_of


def squares(coefficient, logprobs, entropies, index):
    out = []
    for b, row in enumerate(index):
        values = [0.0] * len(row)
        for t, k in enumerate(row):
            if k >= 0:
                p = math.exp(logprobs[b][t])
                most = max(1 - 2 * p + math.exp(-entropies[b][t]), (1 - p) ** 2)
                values[t] = coefficient[b][t] ** 2 * most
        out.append(values)
    return out


def weight(kept, clipped, power):
    g, c = math.sqrt(sum(kept)), math.sqrt(sum(clipped))
    return 1.0 if c <= 1e-12 else (g / (g + c)) ** power


def weights(kept, clipped, index, power, *, of_turns):
    out = []
    for b, row in enumerate(index):
        values = [0.0] * len(row)
        for t, k in enumerate(row):
            if k >= 0:
                group = tokens_of(row, k) if of_turns else [s for s, j in enumerate(row) if j >= 0]
                values[t] = weight(
                    [kept[b][s] for s in group], [clipped[b][s] for s in group], power
                )
        out.append(values)
    return out


def vtrace(rewards, values, drift, index, gamma, lam, mean):
    advantages, targets = [], []
    for b, row in enumerate(index):
        adv, goal = [0.0] * len(row), [0.0] * len(row)
        for k in range(count_turns(row)):
            # Written out from the front: what each later turn's error adds to this one's.
            tail, factor = 0.0, gamma * lam
            for j in range(k + 1, count_turns(row)):
                factor *= _trace(drift[b], row, j, mean)
                tail += factor * _error(rewards[b], values[b], row, j, gamma)
                factor *= gamma * lam
            own = _error(rewards[b], values[b], row, k, gamma)
            for t in tokens_of(row, k):
                adv[t] = own + tail
            start = tokens_of(row, k)[0]
            goal[start] = values[b][start] + _trace(drift[b], row, k, mean) * (own + tail)
        advantages.append(adv)
        targets.append(goal)
    return advantages, targets


def _trace(drift, row, k, mean):
    tokens = tokens_of(row, k)
    return min(1.0, math.exp(sum(drift[t] for t in tokens) / (len(tokens) if mean else 1)))


def _error(rewards, values, row, k, gamma):
    after = tokens_of(row, k + 1)
    following = values[after[0]] if after else 0.0
    return (
        sum(rewards[t] for t in tokens_of(row, k))
        + gamma * following
        - values[tokens_of(row, k)[0]]
    )


def outside(logprobs, old, advantages, index, delta):
    out = []
    for b, row in enumerate(index):
        values = [False] * len(row)
        for k in range(count_turns(row)):
            tokens = tokens_of(row, k)
            far = any(abs(math.exp(logprobs[b][t]) - math.exp(old[b][t])) > delta for t in tokens)
            log_ratio = sum(logprobs[b][t] - old[b][t] for t in tokens)
            for t in tokens:
                values[t] = far and log_ratio * advantages[b][t] > 0
        out.append(values)
    return out


def second_moment(drift, index, limit):
    turns = {}
    for b, row in enumerate(index):
        for k in range(count_turns(row)):
            tokens = tokens_of(row, k)
            turns[b, k] = (sum(drift[b][t] for t in tokens) / len(tokens)) ** 2
    left = dict(turns)
    while left and sum(left.values()) / len(left) > limit:
        del left[max(left, key=left.get)]
    return [[k >= 0 and (b, k) not in left for k in row] for b, row in enumerate(index)]


def behaviour(proximal, old, index, most):
    out = []
    for b, row in enumerate(index):
        values = [1.0] * len(row)
        for k in range(count_turns(row)):
            tokens = tokens_of(row, k)
            mean = sum(proximal[b][t] - old[b][t] for t in tokens) / len(tokens)
            for t in tokens:
                values[t] = min(most, math.exp(mean))
        out.append(values)
    return out


def kernel_gradient(name, logprobs, old, advantages, index):
    """Derivative of the sum of terms with respect to each log-probability."""
    out = []
    for b, row in enumerate(index):
        values = [0.0] * len(row)
        whole = sum(logprobs[b][t] - old[b][t] for t, k in enumerate(row) if k >= 0)
        for t, k in enumerate(row):
            if k < 0:
                continue
            tokens = tokens_of(row, k)
            product = math.exp(sum(logprobs[b][s] - old[b][s] for s in tokens))
            ratio, a = product ** (1 / len(tokens)), advantages[b][t]
            if name == "cispo":
                values[t] = min(ratio, 5.0) * a
            elif name == "tis":
                values[t] = min(math.exp(whole), 8.0) * a
            elif name == "topr":
                values[t] = (min(math.exp(whole), 1.0) if a < 0 else 1.0) * a
            elif name == "vespo":
                power, rate = (2.0, 3.0) if a >= 0 else (3.0, 2.0)
                values[t] = math.exp(rate) * product**power * math.exp(-rate * product) * a
            else:
                for s in tokens:  # every token of the turn moves this one's term
                    tau = 1.0 if advantages[b][s] > 0 else 1.05
                    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
                    values[t] += 4 * gate * (1 - gate) * advantages[b][s] * ratio / len(tokens)
        out.append(values)
    return out
