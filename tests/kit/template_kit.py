"""The chat templates that TRL ships, with tokenizers made here, and conversations as they render them."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers
import trl
from jinja2.exceptions import TemplateError
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.qwen2_audio import processing_qwen2_audio

from trl_stppo.rollout.chat import ChatRenderer
from trl_stppo.trainer._trl import prepare_tool_tokenizer
from trl_stppo.trainer.setup.players import agent_template, growing_template

FOLDER = Path(trl.__file__).parent / "chat_templates"
# Templates of models that read images; the trainers refuse their processors.
VISION = ("idefics3", "llava_next", "qwen2_5_vl", "qwen3_vl", "smolvlm", "lfm2_2_5_vl")
# Tokens that end a turn, as the models' generation configurations list them. The tokenizer's comes first.
ENDS = {
    "cohere": ("<|END_OF_TURN_TOKEN|>",),
    "deepseek": ("<\uff5cend\u2581of\u2581sentence\uff5c>",),
    "diffusion_gemma": ("<turn|>", "<eos>", "<|tool_response>"),
    "gemma": ("<end_of_turn>", "<eos>"),
    "gemma4": ("<turn|>", "<eos>", "<|tool_response>"),
    "glm4moe": ("<|endoftext|>", "<|user|>", "<|observation|>"),
    "gptoss": ("<|return|>", "<|call|>", "<|endoftext|>"),
    "lfm2": ("<|im_end|>",),
    "llama4": ("<|eot|>", "<|end_of_text|>", "<|eom|>"),
    "llama3": ("<|eot_id|>", "<|end_of_text|>", "<|eom_id|>"),
    "muse_glimmer": ("<|eot|>", "<|eom|>"),
    "nemotron": ("<|im_end|>", "<|endoftext|>"),
    "phi3": ("<|endoftext|>", "<|end|>", "<|assistant|>"),
    "qwen": ("<|im_end|>", "<|endoftext|>"),
}
# Ends that are the first token of the next message, or that end nothing but calls.
HEADERS = ("<|user|>", "<|observation|>", "<|tool_response>", "<|call|>")
_TAG = re.compile("<[|\uff5c]?/?[A-Za-z_][\\w\u2581 -]*[|\uff5c]?>")


@dataclass
class Template:
    """A chat template, its tokenizer, and the tokens that end a turn."""

    name: str
    tokenizer: Any
    ends: tuple[str, ...]


def templates() -> list[str]:
    """Return the names of the chat templates of TRL and of transformers' sources, without vision models'."""
    names = [*(path.stem for path in FOLDER.glob("*.jinja")), "llama4", "qwen2_audio"]
    return sorted(name for name in names if name.removesuffix("_training") not in VISION)


def _source(name: str) -> str:
    if name == "qwen2_audio":
        return processing_qwen2_audio.Qwen2AudioProcessor.default_chat_template.fget(None)
    if name == "llama4":
        source = (Path(transformers.__file__).parent / "models/llama4/processing_llama4.py").read_text()
        (value,) = (
            node.value
            for node in ast.parse(source).body
            if isinstance(node, ast.Assign) and node.targets[0].id == "chat_template"
        )
        return ast.literal_eval(value)
    return (FOLDER / f"{name}.jinja").read_text()


def read_template(name: str) -> Template:
    """Read a template, and make a tokenizer of bytes and the template's tags."""
    source = _source(name)
    family = max((family for family in ENDS if name.startswith(family)), key=len)
    return Template(name, byte_tokenizer(source, ENDS[family]), ENDS[family])


def byte_tokenizer(template: str, ends: tuple[str, ...]) -> Any:
    """Make a tokenizer with one token per byte, and one per tag of a template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tags = sorted({*_TAG.findall(template), *ends, "<bos>"})
    core.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        chat_template=template,
        bos_token="<bos>",
        eos_token=ends[0],
        pad_token=ends[-1],
    )


def called(*names: str) -> dict[str, Any]:
    """Return an assistant's message that calls tools, each with the argument "ARG"."""
    functions = [{"name": name, "arguments": {"x": "ARG"}} for name in names]
    calls = [{"type": "function", "function": function} for function in functions]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def said(role: str, content: str, **others: str) -> dict[str, Any]:
    """Return a message."""
    return {"role": role, "content": content, **others}


_RESULTS = {name: said("tool", f"SEEN {name}", name=name) for name in ("look", "find")}
# Conversations by kind: pairs of a turn and the messages that follow it.
CONVERSATIONS: dict[str, list[tuple[dict[str, Any], list[dict[str, Any]]]]] = {
    "text": [(said("assistant", "GO"), [said("user", f"SEEN {n}")]) for n in range(2)],
    "one call": [(called("look"), [_RESULTS["look"]])] * 2,
    "two calls": [(called("look", "find"), [*_RESULTS.values()])] * 2,
    "agent": [
        (called("look"), [_RESULTS["look"]]),
        (said("assistant", "GO"), [said("user", "SEEN")]),
        (called("find"), [_RESULTS["find"], said("user", "SEEN")]),
    ],
}


@dataclass
class Turn:
    """One turn of a conversation as its template writes it, with the rendering up to the next turn.

    Attributes:
        asked: up to the turn.
        whole: up to the next turn.
        end: place in `whole` where the turn's text ends.
        messages: that follow the turn.
    """

    asked: str
    whole: str
    end: int
    messages: list[dict[str, Any]]


def renderer_of(template: Template, kind: str) -> ChatRenderer | None:
    """Return the renderer of training, or None if TRL cannot render or parse the calls."""
    tokenizer = template.tokenizer
    own = ChatRenderer(tokenizer, tokenizer.convert_tokens_to_ids(list(template.ends)))
    if kind == "text":
        chosen = growing_template(own)
    elif kind == "agent":
        chosen = agent_template(own)
        if not any(getattr(tokenizer, f"response_{form}", None) for form in ("schema", "template")):
            return None
    else:
        try:
            chosen = prepare_tool_tokenizer(tokenizer)
        except ValueError:
            return None
    return own.with_options(chat_template=chosen) if chosen else own


def turns(renderer: ChatRenderer | None, kind: str, ends: tuple[str, ...]) -> Iterator[Turn]:
    """Yield the turns of a conversation; a turn that calls tools ends before the first end token.

    There are none without a renderer, or if the template refuses the conversation.
    """
    before = [said("user", "ASKED")]
    for turn, messages in CONVERSATIONS[kind] if renderer else ():
        try:
            asked = text_of(renderer, before)
            whole = text_of(renderer, [*before, turn, *messages])
        except TemplateError:
            return
        mark = "ARG" if turn.get("tool_calls") else "GO"
        seen = len(whole)
        for _ in messages:
            seen = whole.rindex("SEEN", 0, seen)
        end = whole.rindex(mark, 0, seen) + len(mark)
        if mark == "ARG":
            end = min(place for token in ends if (place := whole.find(token, end)) >= 0)
        yield Turn(asked, whole, end, messages)
        before += [turn, *messages]


def text_of(renderer: ChatRenderer, messages: list[dict[str, Any]]) -> str:
    """Return the text of messages, up to the start of the next turn."""
    return renderer.control.rendered_text(messages, add_generation_prompt=True, **renderer.template)
