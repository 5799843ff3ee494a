"""Play episodes with a model and show their tokens.

Tokens are coloured by role and turn: grey is the prompt, blue what the environment said, green and yellow,
alternating, what the model sampled; special tokens are reversed. With --logprobs tokens that the model found
unlikely (below 10 %) are underlined. The same text is shown without colours where the output is no
terminal.

Examples:
    trl-stppo show --config run.yaml --model_name_or_path runs/mine --index 3 --logprobs
    trl-stppo show --model_name_or_path runs/mine --environment my_env:MyEnv --row '{"prompt": "Go."}'
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console
from rich.style import Style
from rich.text import Text
from transformers.utils.logging import disable_progress_bar

from ..agent import Agent, AgentEpisode
from ..trace.pieces import cut
from .agent_models import TokenCounter
from .agents import played_environment
from .arguments import ShowArguments
from .flags import read_flags
from .names import check_name
from .play import pick_row
from .usage import UsageError

UNLIKELY = -2.302585  # log 0.1, in nats
# Of a model that no run has left here.
LIMITS = {"max_turns": 6, "max_completion_length": 512}
PROMPT, OBSERVATION = Style(color="bright_black"), Style(color="bright_blue")
TURNS = (Style(color="green"), Style(color="yellow"))


def play(args: ShowArguments) -> tuple[list[AgentEpisode], Any]:
    """Episodes, and the tokenizer that reads them."""
    name = str(args.model_name_or_path)
    check_name("model_name_or_path", name)
    factory, rows = played_environment(args, TokenCounter(name)), []
    for number in range(args.index, args.index + args.episodes):
        rows.append(pick_row(replace(args, index=number)))
    disable_progress_bar()  # of loading
    agent = Agent.from_pretrained(name)
    names = ("max_turns", "max_turn_tokens", "max_completion_length")
    given = {n: getattr(args, n) for n in names if getattr(args, n) is not None}
    sampling = dict(agent.settings.sampling)
    if args.temperature is not None:
        sampling["temperature"] = args.temperature
    known = LIMITS if agent.settings.trainer is None else {}
    agent.settings = agent.settings.changed(**{**known, **given, "sampling": sampling})
    return agent.run_many(factory, rows, seed=args.seed, greedy=args.greedy), agent.tokenizer


def painted(
    tokenizer: Any, ids: list[int], style: Style, logprobs: list[float] | None = None
) -> Text:
    """Tokens in one colour."""
    special = set(tokenizer.all_special_ids)
    decode = partial(tokenizer.decode, skip_special_tokens=False)
    pieces = cut(ids, decode, getattr(tokenizer, "backend_tokenizer", None))
    text = Text()
    for i, piece in enumerate(pieces):
        unlikely = logprobs is not None and logprobs[i] < UNLIKELY
        text.append(piece, style + Style(reverse=ids[i] in special, underline=unlikely))
    return text


def show(
    console: Console, row: int, episode: AgentEpisode, tokenizer: Any, *, logprobs: bool
) -> None:
    """The episode of a row, turn by turn."""

    def heading(text: str) -> None:
        console.rule(Text(text, "bold"), align="left", style="bright_black")

    heading(f"row {row} · prompt · {len(episode.prompt_ids)} tokens")
    console.print(painted(tokenizer, episode.prompt_ids, PROMPT), soft_wrap=True)
    at = 0
    for turn, (start, end) in enumerate([*episode.turn_spans, (len(episode.ids), None)]):
        if start > at:
            heading(f"environment · {start - at} tokens")
            console.print(painted(tokenizer, episode.ids[at:start], OBSERVATION), soft_wrap=True)
        if end is None:
            break
        reward = episode.rewards[turn]
        heading(f"turn {turn + 1} · {end - start} tokens · reward {reward:g}")
        said = episode.logprobs[start:end] if logprobs else None
        style = TURNS[turn % 2]
        console.print(painted(tokenizer, episode.ids[start:end], style, said), soft_wrap=True)
        at = end
    success = "" if episode.success is None else f" · success {episode.success}"
    error = f" · {episode.error}" if episode.error else ""
    heading(
        f"{episode.stop_reason} · {len(episode.turns)} turns · {len(episode.ids)} tokens · "
        f"return {episode.score:g}{success}{error}"
    )
    console.print()


def run(words: list[str]) -> int:
    """Play and show; the exit code."""
    (args,) = read_flags([ShowArguments], words)
    if args.model_name_or_path is None:
        raise UsageError(
            "`--model_name_or_path` is missing. Name the agent: a folder, or a Hub id."
        )
    episodes, tokenizer = play(args)
    console = Console(highlight=False)
    first = args.index if args.row is None else 0
    for row, episode in enumerate(episodes, first):
        show(console, row, episode, tokenizer, logprobs=args.logprobs)
    return 0
