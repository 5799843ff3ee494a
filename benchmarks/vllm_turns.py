"""Speed of sampling turns: vLLM turn by turn, vLLM in batches, our own cache, continuous batching.

Random weights of 87M parameters, 32 episodes of three turns, prompts and observations of 128 tokens:

    equal     32 tokens a turn; tokens per CPU second
    varied    4 to 100 tokens a turn
    tools     a call of 20 to 200 ms after each turn, by our loop and by TRL's, on the same vLLM; seconds

    python benchmarks/vllm_turns.py            # half an hour on two cores
    python benchmarks/vllm_turns.py --quick    # 8 episodes and 2M parameters

It needs vLLM (`make test-vllm` makes an environment that has it). Each figure comes from a process of its
own, because vLLM leaves a process group behind, all ways in turn. The last line is JSON.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import random
import socket
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import torch
from _launch import launch, send
from _outcome import finish
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Qwen2ForCausalLM
from trl.chat_template_utils import qwen3_template

from rollout import FILL, WORDS, LookEnv, make_rows, make_trainer, play
from trl_stppo.generation.batched import BatchedBackend
from trl_stppo.generation.cached import CachedBackend
from trl_stppo.generation.engine import EngineBackend
from trl_stppo.generation.protocol import TurnRequest
from trl_stppo.generation.sampling import SamplingSettings
from trl_stppo.models.small import tiny_config, tiny_tokenizer

# Turns of an episode; tokens of its prompt and of an observation.
TURNS, ROW = 3, 128
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "desk"}}\n</tool_call>'
WAYS = ("engine", "batched", "own")
TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{%- for c in m.get('tool_calls') or [] -%}<tool_call>\n{{ c['function'] | tojson }}\n</tool_call>"
    "{%- endfor -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
)


def make_model(folder: str, layers: int, width: int) -> dict[str, Any]:
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
    return {"parameters": model.num_parameters()}


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
    backend = {"engine": _engine, "batched": _batched, "own": _own, "generate_batch": _paged}[who](folder)
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
        limit = request.max_new_tokens
        # No text is made, as in training.
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


def tools(folder: str, kind: str, episodes: int) -> dict[str, Any]:
    """Seconds of a rollout whose turns call a slow tool, by our loop or TRL's, on the same vLLM."""
    from trl.generation import vllm_generation

    _unpack_linears()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.response_template = qwen3_template
    words = tokenizer.convert_tokens_to_ids([*WORDS, CALL])
    engine = {"enforce_eager": True, "dtype": "bfloat16"}
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, **engine)
    LookEnv.words = ROW
    prompt = [{"role": "user", "content": FILL * 100}]
    rows = [row | {"prompt": prompt} for row in make_rows(episodes, turns=99, slow=True)]
    trainer = make_trainer(
        kind,
        folder,
        tokenizer,
        rows,
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
        **({"vllm_engine_kwargs": {"dtype": "bfloat16"}} if kind == "ours" else {}),
    )
    # The first one warms up.
    play(trainer, (rows[: max(2, episodes // 8)] * 8)[:episodes])
    figures = play(trainer, rows)
    calls = sum(row.count(words[-1]) for row in figures["ids"])
    times = {name: figures[name] for name in ("seconds", "cpu_seconds")}
    return {"tokens": figures["sampled"], "calls": calls, **times}


def _unpack_linears() -> None:
    """On a CPU vLLM packs its weights, after which none can be sent to it."""
    if torch.cuda.is_available():
        return
    from vllm.model_executor.layers import utils

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = plain


def measure(what: str, folder: str, *rest: str) -> dict[str, Any]:
    """One measurement in this process: `model`, `turns` or `tools`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    if what == "model":
        return make_model(folder, *map(int, rest))
    if what == "turns":
        return turns(folder, rest[0], int(rest[1]), rest[2] == "varied")
    return tools(folder, rest[0], int(rest[1]))


def measured(*words: object) -> dict[str, Any]:
    """One measurement in a process of its own, or why there is none."""
    return launch("vllm_turns.py", "--measure", *words, seconds=3600)


def in_turn(name: str, ways: tuple[str, ...], repeats: int, folder: str, *rest: object) -> dict[str, Any]:
    """Each way `repeats` times, one after the other; medians of every figure."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(repeats):
        for way in ways:
            runs[way].append(measured(name, folder, way, *rest))
            print(f"{name} {way:15} {json.dumps(runs[way][-1])}", flush=True)
    result: dict[str, Any] = {}
    for way, figures in runs.items():
        good = [run for run in figures if "error" not in run]
        failed = next((run for run in figures if "error" in run), {})
        result[way] = failed or {k: statistics.median(run[k] for run in good) for k in good[0]}
    return result


def main() -> None:
    """Run the cases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small model, once each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        return send(measure(*options.measure))
    if importlib.util.find_spec("vllm") is None:
        finish({"skipped": "vLLM is not installed; `make test-vllm` makes an environment with it"})
        return
    repeats, episodes = (1, 8) if options.quick else (options.repeats, 32)
    figures: dict[str, Any] = {"quick": options.quick, "episodes": episodes}
    with tempfile.TemporaryDirectory() as folder:
        model, small = f"{folder}/model", f"{folder}/small"
        figures["model"] = measured("model", model, *((2, 64) if options.quick else (10, 768)))
        measured("model", small, 2, 64)
        kinds = ("varied",) if options.quick else ("equal", "varied")
        for kind in kinds:
            figures[kind] = in_turn("turns", WAYS, repeats, model, episodes, kind)
        # These take minutes for what others do in seconds.
        if not options.quick:
            figures["paged"] = in_turn("turns", ("generate_batch",), 1, model, 4, "equal")
            figures["tools"] = in_turn("tools", ("ours", "trl"), repeats, model, episodes)
        figures["tools_small"] = in_turn("tools", ("ours", "trl"), repeats, small, episodes)
    finish(figures)


if __name__ == "__main__":
    main()
