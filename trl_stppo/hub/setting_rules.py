"""What the fields of `agent.json` may hold: whoever writes one is not known."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

Rule = tuple[Callable[[Any], bool], str]

# Arguments of `apply_chat_template` that whoever renders gives, or that change what it returns.
OF_THE_RENDERER = (
    *("conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize"),
    *("return_dict", "return_tensors", "return_assistant_tokens_mask"),
)
KINDS = ("text", "tools")
LARGEST_ID = 2**31


def _is_whole(value: Any, least: int = 1, below: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value < below


def _is_number(value: Any, above: float = -math.inf, most: float = math.inf) -> bool:
    known = isinstance(value, (int, float)) and not isinstance(value, bool)
    return known and above < value <= most


def _is_environment(entry: Any) -> bool:
    if not isinstance(entry, dict) or not {*map(type, entry.values())} <= {str, type(None)}:
        return False
    return entry.get("kind") in (None, *KINDS)


def _or_null(rule: Rule) -> Rule:
    return (lambda value: value is None or rule[0](value)), f"{rule[1]}, or null"


_COUNT: Rule = _or_null((_is_whole, "a whole number of 1 or more"))
_SECONDS: Rule = _or_null((lambda value: _is_number(value, 0), "a number above 0"))
_TEXT: Rule = _or_null((lambda value: isinstance(value, str), "text"))
_SHARE: Rule = _or_null((lambda v: v == 0 or _is_number(v, 0, 1), "a number from 0 to 1"))
SAMPLING: dict[str, Rule] = {
    "temperature": _SECONDS,
    "repetition_penalty": _SECONDS,
    "top_p": _SHARE,
    "min_p": _SHARE,
    "top_k": _or_null((lambda value: _is_whole(value, 0), "a whole number of 0 or more")),
}
RULES: dict[str, Rule] = {
    "max_completion_length": _COUNT,
    "max_turns": _COUNT,
    "max_turn_tokens": _COUNT,
    "max_tool_rounds": _or_null((lambda v: _is_whole(v, -LARGEST_ID), "a whole number")),
    "max_malformed_actions": _COUNT,
    "env_timeout_seconds": _SECONDS,
    "episode_timeout_seconds": _SECONDS,
    "sampling": (lambda value: isinstance(value, dict), "an object"),
    "eos_token_ids": (
        lambda v: isinstance(v, list) and all(_is_whole(i, 0, LARGEST_ID) for i in v),
        "a list of token ids, whole numbers of 0 or more",
    ),
    "chat_template_kwargs": (
        lambda v: isinstance(v, dict) and not set(OF_THE_RENDERER) & set(v),
        f"an object without {', '.join(OF_THE_RENDERER)}, which are not a template's",
    ),
    "environments": (
        lambda v: isinstance(v, list) and all(map(_is_environment, v)),
        f"a list of objects whose values are text or null, and whose `kind` is {' or '.join(KINDS)}",
    ),
    "tools": (
        lambda v: isinstance(v, list) and all(isinstance(name, str) for name in v),
        "a list of names",
    ),
    "trainer": _TEXT,
    "dtype": _TEXT,
    "quantization": _or_null((lambda value: isinstance(value, dict), "an object")),
    "seed": (lambda value: _is_whole(value, 0, 2**63), "a whole number of 0 or more"),
}


def complaint(settings: dict[str, Any]) -> str | None:
    """What is wrong with the first value that is; None where all may be."""
    sampling = settings.get("sampling")
    nested = sampling if isinstance(sampling, dict) else {}
    checks = [(name, settings[name], rule) for name, rule in RULES.items() if name in settings]
    checks += [(f"sampling.{n}", nested[n], rule) for n, rule in SAMPLING.items() if n in nested]
    for name, value, (allowed, words) in checks:
        if not allowed(value):
            shown = repr(value)
            shown = shown if len(shown) <= 200 else shown[:200] + "..."
            return f"`{name}={shown}` of the agent's settings must be {words}."
    return None
