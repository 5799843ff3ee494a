"""The contract of environments (docs/environments.md), checked on what they return.

An environment gets no tokens: text in, text out. The commands use two optional class methods, `datasets()`
and `figures()`.
"""

import base64
import inspect
import io
import json
import math
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Mapping
from numbers import Number
from pathlib import Path
from typing import Any, NamedTuple

from trl_stppo.errors import EnvironmentContractError

# Columns of a row of a data set, and what a step tells besides its text and reward.
Row = dict[str, Any]
Info = dict[str, Any]
PACKAGE = Path(__file__).resolve().parents[1]
# Folders of installed packages.
LIBRARIES = {"site-packages", "dist-packages"}
STANDARD = sysconfig.get_paths()["stdlib"]


def is_text_environment(env: object) -> bool:
    """Return whether `env.step` is the step of a text environment, not a TRL tool called `step`.

    A TRL tool that is called `step` is annotated `-> str`; a step returns a tuple.
    """
    step = getattr(env, "step", None)
    return callable(step) and inspect.signature(step).return_annotation not in (str, "str")


def taken_columns(reset: Callable[..., object], row: Row, seed: int) -> Row:
    """Return the arguments of a text environment's `reset`: the columns that it names (or all) and a seed."""
    parameters = inspect.signature(reset).parameters
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    columns = {"seed": seed, **row}.items()
    return {name: v for name, v in columns if name in parameters or (takes_all and name in row)}


def without_prompt(rows: str, columns: Iterable[str]) -> str | None:
    """Return a warning if the rows have no prompt, else None. `rows` is the data set's name."""
    columns = list(columns)
    if {"prompt", "input_ids"} & set(columns):
        return None
    return (
        f"`{rows}` has the columns {columns} and no `prompt`: the model reads only the text of `reset`. If a "
        f"column holds the task, rename it to `prompt`."
    )


def tool_names(env: object) -> list[str]:
    """Return the names of the class's public functions, which TRL offers to the model as tools."""
    names = [name for name, _ in inspect.getmembers(type(env), inspect.isfunction)]
    return [n for n in names if not n.startswith("_") and n not in ("reset", "get_reward")]


def tool_schema(tool: Callable[..., object], place: str = "tools") -> dict[str, Any]:
    """Return a tool's schema for a model: `json_schema`, or else a schema made of the tool's hints."""
    from transformers.utils import get_json_schema

    try:
        # `signature` looks through decorators, whose functions often have `*args`.
        kinds = [each.kind for each in inspect.signature(tool).parameters.values()]
        if inspect.Parameter.VAR_POSITIONAL in kinds:
            raise TypeError("a call gives arguments by name, so none for `*args`")
        return dict(getattr(tool, "json_schema", None) or get_json_schema(tool))
    except Exception as error:
        what = f"`{place}` cannot be described to the model: {error}"
        raise EnvironmentContractError(what) from error


class Step(NamedTuple):
    """Checked result of an environment's `step`."""

    observation: Any
    reward: float
    terminated: bool
    truncated: bool
    info: Info

    @property
    def ended(self) -> bool:
        """Return whether the episode is over."""
        return self.terminated or self.truncated


def _wrong(what: str, value: object, allowed: str) -> EnvironmentContractError:
    return EnvironmentContractError(f"{what} {value!r:.200}; allowed: {allowed}.")


def content_of(name: str, value: object, allowed: str) -> Any:
    """Return what a model reads: text, or a list of text and image blocks; a bare image becomes a block."""
    if isinstance(value, str):
        return readable(value)
    if is_picture(value):
        return [{"type": "image", "image": value}]
    blocks: list[Any] = value if isinstance(value, list) else []
    known = [isinstance(b, Mapping) and b.get("type") in ("text", "image") for b in blocks]
    if blocks and all(known):
        if (text := joined_text(blocks)) is not None:
            return readable(text)
        return [{**b, "text": readable(b["text"])} if "text" in b else {**b} for b in blocks]
    raise _wrong(name, value, allowed)


def is_picture(value: object) -> bool:
    """Return whether a value is an image of Pillow, or of a class like it."""
    return hasattr(value, "tobytes") and hasattr(value, "convert")


def decoded_image(data: str) -> Any:
    """Decode a base64 file to an image of Pillow, or raise ValueError."""
    from PIL import Image

    try:
        return Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
    except Exception as error:
        # Pillow raises various errors.
        raise ValueError(f"an image {data!r:.40} in base64 cannot be read: {error}") from error


def check_opening(name: str, result: object) -> Any:
    """Check the result of `reset` and return its content. The info of a pair is not read."""
    if isinstance(result, tuple) and len(result) == 2:
        result = result[0]
    allowed = "a str, an image, None, a list of text and image blocks, or (observation, info)"
    return "" if result is None else content_of(f"{name} returned", result, allowed)


def check_step(name: str, result: object) -> Step:
    """Check the five values that `step` returned."""
    if not isinstance(result, tuple) or len(result) != 5:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        form = "(observation, reward, terminated, truncated, info)"
        raise _wrong(f"{name} returned {got}:", result, form)
    observation, reward, terminated, truncated, info = result
    allowed = 'a str, "" for nothing, an image, or a list of text and image blocks'
    observation = content_of(f"{name} returned the observation", observation, allowed)
    if not isinstance(info, dict):
        raise _wrong(f"{name} returned the info", info, "a dict, {} for nothing, as the last value")
    number = check_number(f"{name} returned the reward", reward)
    flags = {"terminated": terminated, "truncated": truncated}
    flags |= {f"info[{k!r}]": info[k] for k in ("valid_action", "success") if info.get(k) is not None}
    for key, flag in flags.items():
        # A text such as "False" counts as true.
        if not (isinstance(flag, Number) or getattr(flag, "ndim", None) == 0):
            raise _wrong(f"{name} returned {key} =", flag, "True or False, numpy's too")
    return Step(observation, number, bool(terminated), bool(truncated), info)


def result_text(name: str, result: object) -> str:
    """Return a result of a tool or of `reset` as text: text and text blocks unchanged, all else as JSON."""
    text = result if isinstance(result, str) else joined_text(result) if result else None
    if text is None:
        try:
            text = json.dumps(result, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError):
            text = str(result)
            known = isinstance(result, dict | list | tuple | Number) or hasattr(result, "tolist")
            # An object without a text of its own has an address as its text.
            if not known or " at 0x" in text:
                kind = f"a {type(result).__name__}; allowed: text, a number, or JSON"
                raise EnvironmentContractError(f"{name} returned {kind}.") from None
    return readable(text)


def joined_text(content: object) -> str | None:
    """Return the text of a list of text blocks, or None for other content."""
    blocks = content if isinstance(content, list) else [content]
    texts = [b.get("text") for b in blocks if isinstance(b, Mapping) and b.get("type") == "text"]
    given = [text for text in texts if isinstance(text, str)]
    return "".join(given) if len(given) == len(blocks) else None


def readable(text: str) -> str:
    """Replace lone surrogates in a text. Undecodable output of other programs contains them."""
    return text.encode("utf-8", "replace").decode("utf-8")


def check_number(what: str, value: object) -> float:
    """Return a reward as a float, or raise an error if it is not a finite number."""
    number = finite(value)
    if number is None:
        raise _wrong(what, value, "a finite number, 0.0 for nothing")
    return number


def finite(value: Any) -> float | None:
    """Return a number or an array of one number as a float, or None if it is no finite number."""
    # `float` accepts texts too.
    if isinstance(value, str | bytes | bytearray):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def described(error: BaseException) -> str:
    """Return the text of an error, with its place in the code of an environment or agent."""
    try:
        text = str(error)
    except Exception:
        # The `__str__` of an environment's own exception class may fail.
        text = "(its message cannot be read)"
    text = text if len(text) <= 500 else text[:500] + "..."
    # With `rollout_overlap` tools run outside the main thread, where signal handlers cannot be set.
    if "only works in main thread" in text:
        text += " (give environment_factory=isolated(...))"
    # This is sqlite3's message.
    if "same thread" in text:
        text += " (give check_same_thread=False, or environment_factory=isolated(...))"
    if type(error).__name__ == "APIConnectionError":
        text += " (the policy answers through the `client` that an agent gets)"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [f for f in frames if not Path(f.filename).is_relative_to(PACKAGE)]
    # Name the line that calls a library, because it explains more than the library's own line.
    own = [f for f in theirs if not f.filename.startswith(STANDARD)]
    theirs = [f for f in own if not LIBRARIES & {*Path(f.filename).parts}] or own or theirs
    place = f" ({Path(theirs[-1].filename).name}:{theirs[-1].lineno})" if theirs else ""
    return f"{type(error).__name__}: {text}{place}"
