"""ST-PPO on one page: no Trainer, no options, read it from top to bottom.

A small language model plays a game of several turns, with the functions of `trl_stppo.core` and a Python
loop. An update of this page equals one of `STPPOTrainer` (`tests/test_one_page.py`, in float64).
`python scripts/st_ppo_one_page.py` takes about a minute on two cores and ends with the share of games won
before and after. Tensors are [B, T]: episodes, tokens. True in a mask means "counts".

Source: Li et al., ST-PPO, arXiv:2511.20718; docs/algorithm.md says which parts are the paper's.
"""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2ForSequenceClassification, GPT2LMHeadModel

from trl_stppo import core

# ---------------------------------------------------------------------------------- settings
EPISODES, UPDATES = 128, 80  # episodes of a rollout; rollouts
EPOCHS, MINI_BATCHES = 2, 4  # passes over a rollout, optimizer steps of each
TURN_TOKENS = 4  # a turn that has not ended by then is cut off
GAMMA = 1.0  # discount per token; GAE's lambda is 0.9 per turn
CLIPRANGE_VALUE, DESIRED_KL = 0.2, 0.1  # the last one in nats per turn
VF_COEF, MAX_GRAD_NORM = 0.1, 1.0
LEARNING_RATE = 1e-3  # of both

# ---------------------------------------------------------------------------------- the game
# A number from 1 to 7 in three guesses, each answered with higher or lower. One word is one token.
WORDS = ["<pad>", "<end>", "<start>", *"1234567", "higher", "lower", "what?", "over"]
PAD, END, START = 0, 1, 2
TOKEN = {word: token for token, word in enumerate(WORDS)}


class Guess:
    """The game with one number."""

    def __init__(self, number: int) -> None:
        self.number, self.left = number, 3

    def step(self, words: list[str]) -> tuple[str, float, bool]:
        """Take the words of one turn; answer with observation, reward, and whether it is over."""
        self.left -= 1
        guess = int(words[0]) if len(words) == 1 and words[0].isdecimal() else None
        if guess == self.number or self.left == 0:
            return "over", float(guess == self.number), True
        if guess is None:
            return "what?", 0.0, False
        return "higher" if guess < self.number else "lower", 0.0, False


# ---------------------------------------------------------------------------------- episodes
@dataclass
class Episodes:
    """One rollout. `turn_index` is k at the tokens that the agent sampled in turn k, else -1."""

    ids: Tensor  # [B, T] int64, padded on the right; the first token is the prompt
    turn_index: Tensor  # [B, T] int64
    scores: Tensor  # [B], reward of the whole episode


def padded(rows: list[list[int]], filler: int) -> Tensor:
    length = max(map(len, rows))
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows])


@torch.no_grad()
def play(policy: GPT2LMHeadModel, numbers: list[int]) -> Episodes:
    """Play one game per number, all at once, token by token."""
    games = [Guess(number) for number in numbers]
    rows = [[START] for _ in games]
    turns = [[-1] for _ in games]  # the prompt is not the agent's
    said: list[list[str]] = [[] for _ in games]  # words of the turn that is being written
    scores, turn = torch.zeros(len(games)), [0] * len(games)
    live = list(range(len(games)))
    while live:
        ids = padded([rows[b] for b in live], PAD)
        last = torch.tensor([len(rows[b]) - 1 for b in live])
        logits = policy(ids).logits[torch.arange(len(live)), last]
        tokens = torch.multinomial(logits.softmax(-1), 1).squeeze(1).tolist()
        for b, token in zip(list(live), tokens, strict=True):
            rows[b].append(token)
            turns[b].append(turn[b])
            said[b].append(WORDS[token])
            if token != END and len(said[b]) < TURN_TOKENS:
                continue
            words = said[b][:-1] if token == END else said[b]
            observation, reward, over = games[b].step(words)
            scores[b] += reward
            if over:
                live.remove(b)
                continue
            rows[b].append(TOKEN[observation])  # the environment's token: in the row, in no turn
            turns[b].append(-1)
            turn[b], said[b] = turn[b] + 1, []
    return Episodes(padded(rows, PAD), padded(turns, -1), scores)


# ---------------------------------------------------------------------------------- models
def logprobs_of(policy: GPT2LMHeadModel, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of every token but the first, and entropy before it, [B, T - 1] nats each."""
    logprobs = policy(ids).logits[:, :-1].log_softmax(-1)
    entropies = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(-1, ids[:, 1:, None]).squeeze(-1), entropies


def values_of(critic: GPT2ForSequenceClassification, ids: Tensor) -> Tensor:
    """Value of the state before every token but the first, [B, T - 1], reward units."""
    states = critic.base_model(ids).last_hidden_state
    scaled = torch.nn.functional.rms_norm(states, states.shape[-1:], eps=1e-6)
    return critic.score(scaled).squeeze(-1)[:, :-1]


# ---------------------------------------------------------------------------------- advantages
@dataclass
class Batch:
    """A rollout that is ready to be learned from. Column t is about token t + 1 of `ids`: [B, T - 1]."""

    ids: Tensor  # [B, T]
    turn_index: Tensor
    old_logprobs: Tensor  # of the policy that has played, nats
    old_values: Tensor
    advantages: Tensor  # whitened
    returns: Tensor
    spread: Tensor  # [B], standard deviation of the raw advantages

    def __getitem__(self, rows: Tensor) -> "Batch":
        return Batch(*(tensor[rows] for tensor in vars(self).values()))


@torch.no_grad()
def prepare(policy, critic, episodes: Episodes) -> Batch:
    """Rewards to the tokens, then GAE over the agent's tokens, across what the environment said."""
    turn_index = episodes.turn_index[:, 1:]
    agent = turn_index >= 0
    values = values_of(critic, episodes.ids)
    rewards = core.token_rewards(turn_index, scores=episodes.scores.to(values.dtype))
    lam = core.default_lam(float(core.turn_starts(turn_index).sum()), float(agent.sum()))
    advantages, returns = core.token_gae(rewards, values, agent, GAMMA, lam)
    old_logprobs, _ = logprobs_of(policy, episodes.ids)
    spread = advantages[agent].std().expand(len(values))
    whitened = core.whiten(advantages, agent)
    return Batch(episodes.ids, turn_index, old_logprobs, values, whitened, returns, spread)


# ---------------------------------------------------------------------------------- update
class Region:
    """How far an update may move the policy. The trainer also subtracts the KL's rounding error."""

    def __init__(self) -> None:
        self.state = core.Region()

    def begin(self, spread: float) -> None:
        """Allow an update a KL that follows what there is to gain."""
        self.state = self.state.after_rollout(spread)
        self.allowed_kl = DESIRED_KL * self.state.gain(spread)
        self.may_grow, self.has_stepped, self.has_moved = spread > 0.0, False, False

    def admits(self, logprobs: Tensor, batch: Batch, agent: Tensor) -> bool:
        """Measure the KL since the start of the update. Too far: no step, and shorter steps from now on."""
        if not self.has_stepped:
            return True
        kl, turns = core.kl_per_turn(logprobs, batch.old_logprobs, batch.turn_index, agent)
        self.turns, self.ratio = float(turns), float(kl / turns) / self.allowed_kl
        if self.ratio <= 4.0:
            return True
        if self.has_moved:
            self.state = self.state.after_refusal(self.ratio)
        self.has_moved = self.may_grow = False
        return False

    def end(self) -> None:
        """Choose the length of later steps."""
        if self.has_moved:
            self.state = self.state.after_update(self.ratio, self.turns, may_grow=self.may_grow)


def step(policy, critic, optimizer: torch.optim.Optimizer, batch: Batch, region: Region) -> float:
    """One optimizer step on a mini-batch. Returns the factor by which the policy's step was shortened."""
    agent = batch.turn_index >= 0
    logprobs, entropies = logprobs_of(policy, batch.ids)
    # First addition of the paper: one importance ratio for a turn, the geometric mean of its tokens'.
    log_ratio = core.log_importance_ratio(logprobs, batch.old_logprobs, batch.turn_index, "turn")
    # PPO's clip, split in two: the terms that teach, and those that the clip takes away. The ratio is a mean
    # over n tokens, so the width is that of one token over n.
    turns = core.turn_starts(batch.turn_index).sum()
    width = core.default_cliprange(float(agent.sum()), float(turns))
    surrogate = core.clipped_surrogate(log_ratio, batch.advantages, agent, width, width)
    weights = core.aggregation_weights(
        agent, "grpo", num_episodes=len(agent), num_tokens=agent.sum(), dtype=log_ratio.dtype
    )

    def norm_of_gradient(terms: Tensor) -> Tensor:
        loss = (terms * weights).sum()
        (by_logprob,) = torch.autograd.grad(loss, logprobs, retain_graph=True)
        return core.logit_space_squares(by_logprob, logprobs, entropies, agent).sum().sqrt()

    # Second addition: the larger the clipped part of the gradient, the smaller the step.
    kept, clipped = norm_of_gradient(surrogate.kept), norm_of_gradient(surrogate.clipped)
    scale = region.state.factor * float(core.normalization_scale(kept, clipped, "share"))

    error, _ = core.clipped_value_loss(
        values_of(critic, batch.ids), batch.old_values, batch.returns, agent, CLIPRANGE_VALUE
    )
    value_loss = error.sum() / agent.sum()
    (VF_COEF * value_loss - (surrogate.kept * weights).sum()).backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    torch.nn.utils.clip_grad_norm_(critic.parameters(), MAX_GRAD_NORM)
    if region.admits(logprobs, batch, agent):
        region.has_stepped = region.has_moved = True
    else:
        policy.zero_grad()  # the critic's step is taken
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():  # the step is scaled, not the gradient: Adam would divide that out again
        for parameter, start in zip(policy.parameters(), before, strict=True):
            parameter.copy_(start + scale * (parameter - start))
    return scale


def update(policy, critic, optimizer: torch.optim.Optimizer, batch: Batch, region: Region) -> list[float]:
    """All epochs over one rollout, each in mini-batches of its own. Returns the factors of the steps."""
    region.begin(float(batch.spread[0]))
    scales = []
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(batch.ids)).chunk(MINI_BATCHES):
            scales.append(step(policy, critic, optimizer, batch[rows], region))
    region.end()
    return scales


# ---------------------------------------------------------------------------------- run
def models() -> tuple[GPT2LMHeadModel, GPT2ForSequenceClassification]:
    """Policy and critic, a hundred thousand parameters each."""
    shape = {"n_positions": 32, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = GPT2Config(vocab_size=len(WORDS), initializer_range=0.1, num_labels=1, **shape)
    # No dropout: the ratio of a policy that has not moved yet has to be 1.
    return GPT2LMHeadModel(config).eval(), GPT2ForSequenceClassification(config).eval()


def warm_up(policy: GPT2LMHeadModel, steps: int = 200) -> None:
    """Teach the policy to talk: it imitates somebody who listens to every other answer."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-3)
    for _ in range(steps):
        rows = []
        for _ in range(32):
            number, row, possible = random.randint(1, 7), [START], range(1, 8)
            for _ in range(3):
                guess = random.choice(possible if random.random() < 0.5 else range(1, 8))
                row += [TOKEN[str(guess)], END]
                if guess == number:
                    break
                row.append(TOKEN["higher" if guess < number else "lower"])
                possible = [n for n in possible if (n - guess) * (number - guess) > 0]
            rows.append(row)
        ids = padded(rows, PAD)
        (-logprobs_of(policy, ids)[0][ids[:, 1:] != PAD].mean()).backward()
        optimizer.step()
        optimizer.zero_grad()


def success(policy: GPT2LMHeadModel) -> float:
    return float(play(policy, [1 + i % 7 for i in range(280)]).scores.mean())


def main(seed: int = 0) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    policy, critic = models()
    warm_up(policy)
    parameters = [*policy.parameters(), *critic.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)
    region, before = Region(), success(policy)
    for number in range(UPDATES):
        episodes = play(policy, [random.randint(1, 7) for _ in range(EPISODES)])
        scales = update(policy, critic, optimizer, prepare(policy, critic, episodes), region)
        if number % 10 == 9:
            won, scale = episodes.scores.mean(), sum(scales) / len(scales)
            print(f"update {number + 1:3d}  games won {won:.2f}  mean step {scale:.2f}")
    print(f"success {before:.2f} -> {success(policy):.2f}")


if __name__ == "__main__":
    main()
