"""Models of published shapes with random weights for `trl-stppo doctor`, and how fast they are sampled."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ..generation.cached import CachedBackend
from ..generation.protocol import TurnRequest
from ..generation.sampling import SamplingSettings
from ..models.shapes import policy_shape, qwen25
from ..models.small import tiny_config, tiny_tokenizer

Figures = dict[str, Any]


def subject(spec: Figures) -> tuple[Qwen2Config, Any]:
    """The shape that is asked for, and a tokenizer with as many entries."""
    few = tiny_tokenizer([" a" * 50])
    if spec["miniature"]:
        return tiny_config(few), few
    config = qwen25(spec["model"])
    names = (f"<{number}>" for number in range(config.vocab_size - len(few)))
    tokenizer = tiny_tokenizer([" a" * 50], markers=names)
    config.pad_token_id, config.eos_token_id = tokenizer.pad_token_id, tokenizer.eos_token_id
    return config, tokenizer


def random_model(config: Any, dtype: str, **options: Any) -> Any:
    """A model loaded as from a file; all weights are pieces of the same random numbers."""
    kind, cuda = getattr(torch, dtype), torch.cuda.is_available()
    weights = dict(policy_shape(config, dtype).named_parameters())
    pool = torch.randn(max(p.numel() for p in weights.values()), dtype=kind) * 0.02
    pieces = {
        name: torch.ones(p.shape, dtype=kind) if p.dim() == 1 else pool[: p.numel()].view(p.shape)
        for name, p in weights.items()
    }
    if not cuda:  # where loading does not copy
        pieces = {name: piece.clone() for name, piece in pieces.items()}
    options |= {"dtype": kind, "config": copy.deepcopy(config), "state_dict": pieces}
    place = int(os.environ.get("LOCAL_RANK", 0)) if cuda else "cpu"
    return Qwen2ForCausalLM.from_pretrained(None, device_map={"": place}, **options)


def timed(call: Callable[[], Any]) -> float:
    """Seconds until what it starts is done."""
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    wait()
    started = time.perf_counter()
    call()
    wait()
    return time.perf_counter() - started


def sampling(spec: Figures) -> Figures:
    """Sampled tokens per second of our sampler and of `generate`."""
    config, tokenizer = subject(spec)
    model = random_model(config, "bfloat16").eval()
    prompts, new, pad = spec["prompts"], spec["turn_tokens"], tokenizer.pad_token_id
    ids = torch.tensor(prompts, device=model.device)

    def ours() -> None:
        backend = CachedBackend(model, SamplingSettings(), [], pad_token_id=pad)
        with backend.running():
            for key, prompt in enumerate(prompts):
                backend.add(TurnRequest(key, prompt, new, (0, 0, key, 0)))
            while backend.busy:
                backend.step()

    def upstream() -> None:
        length = {"max_new_tokens": new, "min_new_tokens": new, "pad_token_id": pad}
        model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, **length)

    return {
        f"{name}_tokens_per_second": len(prompts) * new / [timed(call), timed(call)][1]
        for name, call in (("sampler", ours), ("generate", upstream))
    }


def vllm_sampling(spec: Figures) -> Figures:
    """Sampled tokens per second of vLLM, with weights that it makes up itself."""
    from vllm import LLM, SamplingParams

    config, tokenizer = subject(spec)
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained("model")
    tokenizer.save_pretrained("model")
    options = {"dtype": "bfloat16", "max_model_len": 1024, "enable_prefix_caching": False}
    engine = LLM("model", load_format="dummy", **options)
    new, rows = spec["turn_tokens"], [{"prompt_token_ids": ids} for ids in spec["prompts"]]
    settings = SamplingParams(max_tokens=new, ignore_eos=True, detokenize=False)
    seconds = [timed(lambda: engine.generate(rows, settings, use_tqdm=False)) for _ in range(2)]
    return {"vllm_tokens_per_second": len(rows) * new / seconds[1]}
