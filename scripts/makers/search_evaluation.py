"""Play the search task with a model and count what it did.

The tokens of an episode only ever grow: what the model sampled is kept as sampled, and an
observation adds the tokens that the chat template puts after an end of turn.
"""

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from search_demonstrations import GENERIC_QUERIES, GIVE_UP

sys.path.append(str(Path(__file__).parents[1] / "search"))
from search_env.env import StdlibSearchEnv


class Episode:
    """One question being answered, with the tokens so far."""

    def __init__(self, row: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> None:
        self.row = row
        self.env = StdlibSearchEnv()
        self.env.reset(**row)
        self.tokens: list[int] = tokenizer.apply_chat_template(
            row["prompt"], add_generation_prompt=True, return_dict=False
        )
        self.actions: list[str] = []
        self.observations: list[str] = []
        self.turn_lengths: list[int] = []
        self.success = False
        self.done = False

    def advance(self, turn: list[int], tokenizer: PreTrainedTokenizerBase) -> None:
        """Append a sampled turn, and the observation it leads to."""
        action = tokenizer.decode(turn, skip_special_tokens=True)
        observation, reward, self.done, _, _ = self.env.step(action)
        self.actions.append(action)
        self.observations.append(observation)
        self.turn_lengths.append(len(turn))
        self.success = reward == 1.0
        self.tokens += turn
        if not self.done:
            self.tokens += observation_tokens(observation, tokenizer)


def observation_tokens(observation: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the tokens after the model's end of turn: the observation and the next generation prompt."""
    dummy = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": observation},
    ]
    tokens: list[int] = tokenizer.apply_chat_template(dummy, add_generation_prompt=True, return_dict=False)
    end_of_first_turn = tokenizer.apply_chat_template(dummy[:2], return_dict=False)
    return tokens[len(end_of_first_turn) :]


@torch.no_grad()
def play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    *,
    max_turns: int = 4,
    max_new_tokens: int = 32,
) -> list[Episode]:
    """Sample one episode per row at temperature 1, all of them at once."""
    episodes = [Episode(row, tokenizer) for row in rows]
    for _ in range(max_turns):
        running = [episode for episode in episodes if not episode.done]
        if not running:
            break
        padded = tokenizer.pad(
            {"input_ids": [episode.tokens for episode in running]},
            return_tensors="pt",
            padding_side="left",
        ).to(model.device)
        output = model.generate(
            **padded, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_new_tokens
        )[:, padded["input_ids"].shape[1] :].tolist()
        for episode, turn in zip(running, output, strict=True):
            if tokenizer.eos_token_id in turn:
                turn = turn[: turn.index(tokenizer.eos_token_id) + 1]
            episode.advance(turn, tokenizer)
    return episodes


def evaluate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    *,
    samples: int = 8,
    seed: int = 0,
) -> dict[str, float]:
    """Sample every question several times.

    Returns:
        success: share of episodes that succeed.
        success_one_hop, success_two_hops: the same, by number of searches needed.
        pass_at_k: share of questions with at least one success among their samples.
        right_start: share of first turns that search the asked name.
        copied_query: of first searches for some name, the share that is the asked name.
        copied_answer: of answers given right after the gold answer was shown, the share that is
            right among those that are neither something else that was shown nor giving up.
        turns, turn_tokens, episode_tokens: means.
        longest_episode: tokens.
    """
    torch.manual_seed(seed)
    runs = [play(model, tokenizer, rows) for _ in range(samples)]
    episodes = [episode for run in runs for episode in run]
    counts = Counter(event for episode in episodes for event in _events(episode))
    by_hops = {hops: [e.success for e in episodes if e.row["hops"] == hops] for hops in (1, 2)}
    solved = [any(run[i].success for run in runs) for i in range(len(rows))]
    lengths = [length for episode in episodes for length in episode.turn_lengths]
    return {
        "success": _mean([episode.success for episode in episodes]),
        "success_one_hop": _mean(by_hops[1]),
        "success_two_hops": _mean(by_hops[2]),
        "pass_at_k": _mean(solved),
        "right_start": counts["right_start"] / len(episodes),
        "copied_query": counts["right_start"] / max(1, counts["name_searched"]),
        "copied_answer": counts["answer_right"] / max(1, counts["answer_right"] + counts["answer_garbled"]),
        "turns": _mean([len(episode.actions) for episode in episodes]),
        "turn_tokens": _mean(lengths),
        "episode_tokens": _mean([len(episode.tokens) for episode in episodes]),
        "longest_episode": max(len(episode.tokens) for episode in episodes),
    }


def _events(episode: Episode) -> list[str]:
    """Return the events of an episode that `evaluate` counts."""
    events = []
    first = episode.actions[0]
    if first.startswith("<search>") and first.endswith("</search>"):
        query = first.removeprefix("<search>").removesuffix("</search>").strip()
        if query not in GENERIC_QUERIES:
            events.append("name_searched")
        if query == episode.row["name"]:
            events.append("right_start")
    last = episode.actions[-1]
    if last.startswith("<answer>") and len(episode.actions) > 1:
        shown = episode.observations[-2]
        answer = last.removeprefix("<answer>").removesuffix("</answer>").strip()
        if any(f" {gold}" in shown for gold in episode.row["answers"]):
            if episode.success:
                events.append("answer_right")
            elif f" {answer}" not in shown and answer != GIVE_UP:
                events.append("answer_garbled")
    return events


def _mean(values: Sequence[float]) -> float:
    return sum(values) / max(1, len(values))
