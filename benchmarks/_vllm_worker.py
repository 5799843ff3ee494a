"""One way of sampling turns, in a process of its own: vLLM leaves a process group behind.

    python benchmarks/_vllm_worker.py model FOLDER LAYERS WIDTH
    python benchmarks/_vllm_worker.py turns FOLDER WHO EPISODES equal|varied
    python benchmarks/_vllm_worker.py tools FOLDER ours|trl EPISODES

`vllm_turns.py` starts it and reads the line of JSON that it ends with.
"""

from __future__ import annotations

import functools
import json
import os
import random
import socket
import sys
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2ForCausalLM
from trl import GRPOConfig
from trl.chat_template_utils import qwen3_template

from rollout import FILL, LookEnv, _Played, _StoppingOurs, _StoppingTRL
from trl_stppo import PPOConfig
from trl_stppo.generation.batched import BatchedBackend
from trl_stppo.generation.cached import CachedBackend
from trl_stppo.generation.engine import EngineBackend
from trl_stppo.generation.protocol import TurnRequest
from trl_stppo.generation.sampling import SamplingSettings
from trl_stppo.models.small import tiny_config, tiny_tokenizer

TURNS, ROW = 3, 128  # turns of an episode; tokens of its prompt and of an observation
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "desk"}}\n</tool_call>'
WORDS = [f" w{i:02d}" for i in range(20)]
TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{%- for c in m.get('tool_calls') or [] -%}<tool_call>\n{{ c['function'] | tojson }}\n</tool_call>"
    "{%- endfor -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def make_model(folder: str, layers: int, width: int) -> None:
    """Random weights with a vocabulary of the usual size, so that sampling costs what it does."""
    markers = ["<|im_start|>", "<|im_end|>", CALL, *WORDS, FILL]
    tokenizer = tiny_tokenizer(["user assistant tool look around"] * 4, markers=markers)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = qwen3_template
    torch.manual_seed(0)
    shape = {"hidden_size": width, "intermediate_size": 3 * width, "num_hidden_layers": layers}
    heads = max(2, width // 64)
    config = tiny_config(
        tokenizer,
        **shape,
        vocab_size=32_000,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=2048,
    )
    config.tie_word_embeddings = True
    model = Qwen2ForCausalLM(config).bfloat16()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(json.dumps({"parameters": model.num_parameters()}))


def limits(episodes: int, varied: bool) -> dict[tuple[int, int], int]:
    """Tokens of each turn: 32, or 4 to 100."""
    draw = random.Random(0)
    places = [(episode, turn) for episode in range(episodes) for turn in range(TURNS)]
    return {place: draw.randint(4, 100) if varied else 32 for place in places}


def play_turns(backend: Any, tokens: dict[tuple[int, int], int]) -> Any:
    """All turns of all episodes, the next one of an episode as soon as the one before has ended."""
    draw = random.Random(1)
    rows, turns = {}, {}
    for episode in sorted({episode for episode, _ in tokens}):
        rows[episode], turns[episode] = [draw.randrange(100, 30_000) for _ in range(ROW)], 0
    started, cpu, sampled = time.perf_counter(), time.process_time(), 0
    for episode, row in rows.items():
        backend.add(TurnRequest(episode, list(row), tokens[episode, 0], (episode, 0)))
    while backend.busy:
        for result in backend.step():
            key, turn = result.key, turns[result.key] + 1
            sampled += len(result.ids)
            rows[key] += [*result.ids, *(draw.randrange(100, 30_000) for _ in range(ROW))]
            turns[key] = turn
            if turn == TURNS:
                backend.release(key)
            else:
                limit = tokens[key, turn]
                backend.add(TurnRequest(key, list(rows[key]), limit, (key, turn)))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {"tokens": sampled, "seconds": seconds, "cpu_seconds": cpu, "per_cpu": sampled / cpu}


def turns(folder: str, who: str, episodes: int, varied: bool) -> dict[str, Any]:
    """Tokens per CPU second of a backend; nobody but `who` is in this process."""
    tokens = limits(episodes, varied)
    warm = {place: 4 for place in limits(2, False)}
    backend = {"engine": _engine, "batched": _batched, "own": _own, "generate_batch": _paged}[who](
        folder
    )
    running = getattr(backend, "running", None)
    with running() if running is not None else torch.no_grad():
        play_turns(backend, warm)
        return play_turns(backend, tokens)


def _llm(folder: str) -> Any:
    from vllm import LLM

    # As TRL makes it: within this process.
    options = {"distributed_executor_backend": "external_launcher", "max_num_batched_tokens": 4096}
    return LLM(folder, enforce_eager=True, max_model_len=1024, seed=0, **options)


def _engine(folder: str) -> Any:
    from vllm import SamplingParams

    def options(request: TurnRequest) -> dict[str, Any]:
        limit = request.max_new_tokens  # and no text, as in training
        own = SamplingParams(max_tokens=limit, logprobs=0, ignore_eos=True, detokenize=False)
        return {"params": own, "lora_request": None}

    return EngineBackend(_llm(folder).llm_engine, options)


def _batched(folder: str) -> Any:
    """As TRL's `VLLMGeneration.generate` is asked: all that are ready, with the largest limit."""
    from vllm import SamplingParams

    llm = _llm(folder)

    def generate(rows: list[list[int]], limit: int, seeds: Any) -> Any:
        params = SamplingParams(max_tokens=limit, logprobs=0, ignore_eos=True)
        prompts = [{"prompt_token_ids": row} for row in rows]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        ids = [list(output.outputs[0].token_ids) for output in outputs]
        return ids, [[0.0] * len(row) for row in ids]

    return BatchedBackend(generate)


def _model(folder: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


def _own(folder: str) -> Any:
    return CachedBackend(_model(folder), SamplingSettings(), [], pad_token_id=0)


def _paged(folder: str) -> Any:
    """Transformers' continuous batching, which TRL's `use_transformers_continuous_batching` uses."""
    model = _model(folder).eval()

    def generate(rows: list[list[int]], limit: int, seeds: Any) -> Any:
        config = GenerationConfig(max_new_tokens=limit, do_sample=True, eos_token_id=-1)
        outputs = model.generate_batch(rows, generation_config=config, progress_bar=False)
        return [list(output.generated_tokens) for output in outputs.values()], None

    return BatchedBackend(generate)


# ------------------------------------------------------------------------------ with tools


class SlowLook(LookEnv):
    """Tools take 20 to 200 ms."""

    def reset(self, **row: Any) -> str:
        super().reset(**row, slow=True, hangs=False, turns=99)
        return ""

    def look(self, place: str) -> str:
        """Look somewhere.

        Args:
            place: where.
        """
        return super().look(place)[: ROW * len(FILL)]


def tools(folder: str, kind: str, episodes: int) -> dict[str, Any]:
    """Seconds of a rollout whose turns call a slow tool, by our loop or TRL's, on the same vLLM."""
    from trl.generation import vllm_generation

    _unpack_linears()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = qwen3_template
    words = tokenizer.convert_tokens_to_ids([*WORDS, CALL])
    ours = kind == "ours"
    trainer_class, config = (_StoppingOurs, PPOConfig) if ours else (_StoppingTRL, GRPOConfig)
    options: dict[str, Any] = (
        {"num_generations": 1, "kl_coef": 0.0} if ours else {"num_generations": 2}
    )
    engine = {"enforce_eager": True, "dtype": "bfloat16"}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **engine)
    options |= {"vllm_engine_kwargs": {"dtype": "bfloat16"}} if ours else {}
    args = config(
        folder + "-run",
        per_device_train_batch_size=episodes,
        max_completion_length=900,
        max_tool_calling_iterations=TURNS - 1,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=0.05,
        vllm_max_model_length=1024,
        # Words until the call comes, which a turn ends with.
        generation_kwargs={"allowed_token_ids": words, "stop_token_ids": words[-1:]},
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **options,
    )
    rows = [
        {"prompt": [{"role": "user", "content": FILL * 100}], "number": n} for n in range(episodes)
    ]
    trainer = trainer_class(
        model=folder,
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        environment_factory=SlowLook,
        reward_funcs=[] if ours else None,
    )
    for batch in (rows[: max(2, episodes // 8)] * 8, rows):  # the first warms up
        trainer.model.train()
        started, cpu = time.perf_counter(), time.process_time()
        try:
            trainer._generate_and_score_completions([dict(row) for row in batch[:episodes]])
        except _Played as played:
            ids, mask, _, ended = played.args
    sampled = sum(map(sum, mask))
    return {
        "tokens": sampled,
        "calls": sum(row.count(words[-1]) for row in ids),
        "seconds": ended - started,
        "cpu_seconds": time.process_time() - cpu,
    }


def _unpack_linears() -> None:
    """On a CPU vLLM packs its weights, after which none can be sent to it."""
    if torch.cuda.is_available():
        return
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def main() -> None:
    """One measurement."""
    what, folder, *rest = sys.argv[1:]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if what == "model":
        make_model(folder, *map(int, rest))
    elif what == "turns":
        print(json.dumps(turns(folder, rest[0], int(rest[1]), rest[2] == "varied")))
    else:
        print(json.dumps(tools(folder, rest[0], int(rest[1]))))


if __name__ == "__main__":
    main()
