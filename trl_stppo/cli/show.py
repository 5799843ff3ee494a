"""`trl-stppo show`: play a few episodes with a model and show their tokens, coloured by role and turn.

Grey is the prompt, blue what the environment said, green and yellow in turn what the model sampled;
special tokens are reversed. With --logprobs tokens that the model found unlikely (below 10 %) are
underlined. The same text is shown without colours where the output is no terminal.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.style import Style
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

from ..generation.sampling import SamplingSettings
from ..rollout.episode import Episode, Limits
from ..trainer.play import play_episodes
from .agents import load_environment
from .flags import read_flags
from .play import PlayArguments, pick_row
from .usage import UsageError

UNLIKELY = -2.302585  # log 0.1, in nats
PROMPT, OBSERVATION = Style(color="bright_black"), Style(color="bright_blue")
TURNS = (Style(color="green"), Style(color="yellow"))


@dataclass
class ShowArguments(PlayArguments):
    """What to play, with whom, and how.

    Parameters:
        model_name_or_path (`str`): the agent.
        episodes (`int`): how many rows, from `index` on; the same `row` so many times.
        greedy (`bool`): the likeliest token instead of a sampled one.
        temperature (`float`), seed (`int`): of sampling.
        max_turns, max_turn_tokens, max_completion_length (`int`): limits of an episode.
        logprobs (`bool`): underline unlikely tokens.
    """

    model_name_or_path: str | None = field(default=None, metadata={"help": "The agent."})
    episodes: int = field(default=1, metadata={"help": "How many rows, from --index on."})
    greedy: bool = field(default=False, metadata={"help": "The likeliest token each time."})
    temperature: float = field(default=1.0, metadata={"help": "Of sampling."})
    seed: int = field(default=0, metadata={"help": "Of sampling."})
    max_turns: int | None = field(default=6, metadata={"help": "Turns of an episode."})
    max_turn_tokens: int | None = field(default=None, metadata={"help": "Tokens of a turn."})
    max_completion_length: int = field(default=512, metadata={"help": "Tokens of an episode."})
    logprobs: bool = field(default=False, metadata={"help": "Underline unlikely tokens."})


def play(args: ShowArguments) -> tuple[list[Episode], Any]:
    """Episodes, and the tokenizer that reads them."""
    tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(args.model_name_or_path)
    model = model.to("cuda" if torch.cuda.is_available() else "cpu")
    rows = []
    for _ in range(args.episodes):
        rows.append(pick_row(args))
        args.index += 1
    episodes = play_episodes(
        model,
        tokenizer,
        load_environment(args),
        rows,
        Limits(args.max_completion_length, args.max_turns, args.max_turn_tokens),
        SamplingSettings(do_sample=not args.greedy, temperature=args.temperature),
        seed=args.seed,
    )
    return episodes, tokenizer


def pieces(tokenizer: Any, ids: list[int]) -> list[str]:
    """The text of each token, characters that span several tokens with the last of them."""
    texts, shown = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(ids[:end], skip_special_tokens=False)
        whole = not text.endswith("\ufffd")
        texts.append(text[len(shown) :] if whole else "")
        shown = text if whole else shown
    return texts


def painted(
    tokenizer: Any, ids: list[int], style: Style, logprobs: list[float] | None = None
) -> Text:
    """Tokens in one colour."""
    special = set(tokenizer.all_special_ids)
    text = Text()
    for i, piece in enumerate(pieces(tokenizer, ids)):
        unlikely = logprobs is not None and logprobs[i] < UNLIKELY
        text.append(piece, style + Style(reverse=ids[i] in special, underline=unlikely))
    return text


def show(console: Console, episode: Episode, tokenizer: Any, *, logprobs: bool) -> None:
    """One episode, turn by turn."""

    def heading(text: str) -> None:
        console.rule(Text(text, "bold"), align="left", style="bright_black")

    heading(f"row {episode.row} · prompt · {len(episode.prompt_ids)} tokens")
    console.print(painted(tokenizer, episode.prompt_ids, PROMPT), soft_wrap=True)
    at = 0
    for turn, (start, end) in enumerate([*episode.turn_spans, (len(episode.ids), None)]):
        if start > at:
            heading(f"environment · {start - at} tokens")
            console.print(painted(tokenizer, episode.ids[at:start], OBSERVATION), soft_wrap=True)
        if end is None:
            break
        reward = episode.turn_rewards[turn]
        heading(f"turn {turn} · {end - start} tokens · reward {reward:g}")
        said = episode.logprobs[start:end] if logprobs else None
        style = TURNS[turn % 2]
        console.print(painted(tokenizer, episode.ids[start:end], style, said), soft_wrap=True)
        at = end
    earned = sum(episode.turn_rewards) + (episode.final_reward or 0.0)
    success = "" if episode.success is None else f" · success {episode.success}"
    error = f" · {episode.error}" if episode.error else ""
    heading(
        f"{episode.stop_reason} · {episode.num_turns} turns · {len(episode.ids)} tokens · "
        f"return {earned:g}{success}{error}"
    )
    console.print()


def flag_types_of(words: list[str]) -> tuple[type, ...]:
    """The dataclass of the flags."""
    return (ShowArguments,)


def run(words: list[str]) -> int:
    """Play and show; the exit code."""
    (args,) = read_flags([ShowArguments], words)
    if args.model_name_or_path is None:
        raise UsageError(
            "`--model_name_or_path` is missing. Name the agent: a folder, or a Hub id."
        )
    episodes, tokenizer = play(args)
    console = Console(highlight=False)
    for episode in episodes:
        show(console, episode, tokenizer, logprobs=args.logprobs)
    return 0
