"""All uses of private parts of TRL and transformers, in one file.

`tests/test_trl_contract.py` compares the methods that our trainers wrap or replace, and the state that they
read, with the installed TRL. If it fails after an upgrade, read the upstream diff, adapt this package, then
refresh the recorded hashes.
"""

# Names that are unused here are imported by other files.
# ruff: noqa: F401

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers import trainer as upstream_trainer
from transformers.integrations import TrackioCallback
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import (
    add_response_schema,
    get_training_chat_template,
    is_chat_template_prefix_preserving,
    parse_response,
    supports_tool_calling,
)
from trl.data_utils import apply_chat_template, prepare_multimodal_messages
from trl.extras.profiling import profiling_context, profiling_decorator
from trl.kernels import chunked_logprob
from trl.models.utils import (
    disable_gradient_checkpointing,
    prepare_deepspeed,
    prepare_fsdp,
    unwrap_model_for_generation,
)
from trl.trainer.callbacks import SyncRefModelCallback
from trl.trainer.utils import (
    add_fused_lm_head,
    create_model_from_path,
    disable_dropout_in_model,
    get_config_model_id,
    pad,
    print_prompt_completions_sample,
    use_adapter,
)

from ..rollout.chat import ChatRenderer, Message

logger = logging.getLogger(__name__)
# TRL reads the old name, which is the only one in the oldest transformers that we support.
warnings.filterwarnings("ignore", "`(is_)?gradient_checkpointing` is deprecated", FutureWarning)

# Upstream's methods that our rollout step replaces: overriding one of these has no effect.
NOT_CALLED = ("_generate", "_tokenize_prompts", "_tool_call_loop")
# Tokens per tile when TRL computes log-probabilities without Triton.
TORCH_TILE_TOKENS = 256
MAX_NESTING = 64


class SingleGeneration(int):
    """The integer 1, for which every comparison `<` is false.

    `GRPOConfig.__post_init__` refuses `num_generations < 2` halfway through its checks and offers no
    switch. With this value in place the comparison is false and the later checks still run.
    """

    def __lt__(self, other: object) -> bool:
        return False


@contextmanager
def replaced(owner: object, **values: object) -> Iterator[None]:
    """Context manager that sets attributes of `owner` to `values`, and restores them at its end."""
    before = {name: getattr(owner, name) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def small_tiles(device: torch.device) -> Iterator[None]:
    """Context manager with smaller tiles of log-probabilities if TRL's fused head runs without Triton.

    With Triton a tile of log-probabilities takes two bytes per entry of the vocabulary. Without it, on the
    CPU, eight tables of its size are alive at once: a gigabyte per thousand tokens of a tile, without any
    gain in speed.
    """
    tokens = chunked_logprob.TOKEN_CHUNK_SIZE
    if not chunked_logprob._use_triton(device):
        tokens = min(tokens, TORCH_TILE_TOKENS)
    with replaced(chunked_logprob, TOKEN_CHUNK_SIZE=tokens):
        yield


def new_token_limit(trainer: GRPOTrainer, max_new_tokens: int) -> AbstractContextManager[None]:
    """Return a context manager that limits the new tokens of a generation call, with vLLM or transformers."""
    if trainer.use_vllm:
        return replaced(trainer.vllm_generation, max_completion_length=max_new_tokens)
    return replaced(trainer.generation_config, max_new_tokens=max_new_tokens)


def open_trackio(trainer: GRPOTrainer) -> None:
    """Open trackio early, because TRL's profiling logs before upstream opens it."""
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, TrackioCallback) and not callback._initialized:
            callback.setup(trainer.args, trainer.state, trainer.model)


@contextmanager
def uploads_of(chosen: Callable[[Path], list[str]], jobs: dict[Future[object], Path]) -> Iterator[None]:
    """Context manager in which upstream uploads only the files of a folder that `chosen` lists.

    Uploads in the background are added to `jobs`, with their folders. A failure, which upstream ignores, is
    a warning.
    """
    original = upstream_trainer.hf_api

    def tell_failure(job: Future[object]) -> None:
        error = None if job.cancelled() else job.exception()
        if error is not None:
            text = "The upload of `%s` failed, and training goes on; the next one includes it: %s"
            logger.warning(text, jobs[job], error)

    def api() -> Any:
        real = original()
        ours = copy.copy(real)

        def upload_folder(*, folder_path: str, **kwargs: object) -> object:
            folder = Path(folder_path)
            kwargs["allow_patterns"] = chosen(folder)
            result = real.upload_folder(folder_path=folder_path, **kwargs)
            if isinstance(result, Future):
                jobs[result] = folder
                result.add_done_callback(tell_failure)
            return result

        ours.upload_folder = upload_folder
        return ours

    with replaced(upstream_trainer, hf_api=api):
        yield


def max_context_tokens(trainer: GRPOTrainer) -> int | None:
    """Return the maximum length of prompt plus completion of the generating model, in tokens."""
    if trainer.use_vllm and trainer.vllm_mode == "colocate":
        return trainer.vllm_generation.llm.llm_engine.model_config.max_model_len
    return getattr(trainer.model.config.get_text_config(), "max_position_embeddings", None)


def overrides(trainer: GRPOTrainer, name: str) -> bool:
    """Return whether a trainer's class or instance overrides the GRPOTrainer method `name`."""
    own = vars(trainer).get(name) or getattr(type(trainer), name)
    return own is not getattr(GRPOTrainer, name)


def check_overrides(trainer: GRPOTrainer) -> None:
    """Refuse overrides of methods that are never called; warn of one whose results differ from TRL's."""
    for name in NOT_CALLED:
        if overrides(trainer, name):
            raise TypeError(
                f"`{type(trainer).__name__}.{name}` would never be called. Pass a `rollout_func`, or "
                f"override `_generate_single_turn` or `_calculate_rewards`."
            )
    name, package = "_generate_and_score_completions", __name__.split(".")[0]
    if getattr(trainer, name).__module__.split(".")[0] != package:
        logger.warning(
            "`%s.%s` returns `advantages` of shape [B, T], one per token, where TRL's are [B].",
            type(trainer).__name__, name,
        )  # fmt: skip


def read_message(
    renderer: ChatRenderer,
    ids: list[int],
    before: list[int],
    tools: Sequence[Callable[..., object]] = (),
) -> Message:
    """Parse the tokens of an assistant's turn into a message, tool calls included if possible."""
    tokenizer = renderer.tokenizer
    if any(getattr(tokenizer, f"response_{form}", None) for form in ("template", "schema")):
        # Keep the text if arguments such as `[[[[` nest too deeply for a recursive parser.
        with suppress(RecursionError):
            message = parse_response(tokenizer, ids, prefix=before, tools=list(tools))
            if not _is_deep(message.get("tool_calls")):
                return message
    return {"role": "assistant", "content": renderer.decode_action(ids)}


def _is_deep(value: object, levels: int = MAX_NESTING) -> bool:
    """Return whether lists and dicts are nested too deeply for functions that recurse into them."""
    if not isinstance(value, dict | list):
        return False
    parts = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deep(part, levels - 1) for part in parts)


def training_template(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return TRL's prefix-preserving form of the chat template; None if TRL has none."""
    try:
        return get_training_chat_template(tokenizer)
    except ValueError:
        return None


def check_tool_template(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise ValueError if the chat template does not support tools."""
    if not supports_tool_calling(tokenizer):
        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        raise ValueError(
            f"The chat template of {tokenizer.name_or_path!r} cannot render tool calls and their results. A "
            f"ChatML model takes TRL's: `tokenizer.chat_template = "
            f"trl.chat_template_utils.qwen2_5_chat_template`; then pass `processing_class=tokenizer`."
        )


def prepare_tool_tokenizer(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Prepare a tokenizer for tools as GRPOTrainer's constructor does; return the template to use."""
    check_tool_template(tokenizer)
    if not any(getattr(tokenizer, f"response_{form}", None) for form in ("template", "schema")):
        add_response_schema(tokenizer)
    grows = is_chat_template_prefix_preserving(tokenizer)
    return None if grows else get_training_chat_template(tokenizer)


def disable_dropout(model: nn.Module) -> None:
    """Disable dropout modules as TRL does, and rates stored as plain numbers, such as OPT's `layerdrop`."""
    disable_dropout_in_model(model)
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
