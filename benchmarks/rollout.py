"""Rollout speed: our engine against GRPOTrainer's tool loop, on the same model and environment.

Three cases, each played by both in turn, in one run:

    i    tools answer at once; 2 to 8 turns, observations of 200 tokens
    ii   each tool call takes 20 to 200 ms
    iii  one environment in 32 hangs

and the floor: for episodes of five turns each, one plain `generate` over the same number of sampled
tokens, with all observations already in the prompt. The model is a real transformer whose next token is
forced after the forward pass, so that it calls tools as scripted whatever its weights are.

    python benchmarks/rollout.py            # minutes
    python benchmarks/rollout.py --quick    # under a minute; the hang lasts 5 s instead of 30
    python benchmarks/rollout.py --model smollm2    # after `make pretrained`; case i with 8 episodes

SmolLM2 reads observations of 50 tokens.

The last line is JSON with every figure.
"""

from __future__ import annotations

import argparse
import copy
import functools
import os
import random
import statistics
import tempfile
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from _episodes import QUIET
from _outcome import finish, show
from datasets import Dataset
from geometries import SMOLLM2
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM, logging
from trl import GRPOConfig, GRPOTrainer
from trl.chat_template_utils import qwen3_template

from trl_stppo import PPOConfig, PPOTrainer
from trl_stppo.models.small import tiny_config, tiny_tokenizer
from trl_stppo.trainer.loop.player import EpisodePlayer

TURN_WORDS = 20
OPEN, CLOSE = '<tool_call>\n{"name": "look", "arguments": {"place": "', '"}}\n</tool_call>'
WORDS = [f" w{i:02d}" for i in range(TURN_WORDS)]
NEXT, LAST, FILL, DONE = "<|next|>", "<|last|>", " fill", " done"
# The word that an observation ends with decides whether the model goes on; the template turns it
# into the token that the forced chain starts from.
TEMPLATE = (
    "{%- for m in messages -%}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{%- for c in m.get('tool_calls') or [] -%}"
    "{{ c['function']['name'] }}{{ c['function']['arguments'] | tojson }}"
    "{%- endfor -%}<|im_end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n"
    "{% if messages[-1]['content'][-4:] == 'done' -%}<|last|>{%- else -%}<|next|>{%- endif -%}"
    "{%- endif -%}"
)


class LookEnv:
    """Answers with `words` after a pause; after the row's number of turns it says so."""

    hang_seconds = 30.0
    words = 196

    def reset(self, **row: Any) -> str:
        """Start; the row says how many turns, and whether to be slow or to hang."""
        self._row, self._calls = row, 0
        return ""

    def look(self, place: str) -> str:
        """Look somewhere.

        Args:
            place: where.
        """
        self._calls += 1
        if self._row["hangs"] and self._calls == 1:
            time.sleep(self.hang_seconds)
        if self._row["slow"]:
            draw = random.Random(f"{self._row['number']} {self._calls}")
            time.sleep(draw.uniform(0.02, 0.2))
        over = self._calls + 1 >= self._row["turns"]
        return FILL * self.words + (DONE if over else "")

    def get_reward(self) -> float:
        """Return how often the model looked."""
        return float(self._calls)


def make_tokenizer() -> Any:
    """A tokenizer in which every piece of the script is one token."""
    markers = ["<|im_start|>", "<|im_end|>", NEXT, LAST, OPEN, CLOSE, *WORDS, FILL, DONE]
    tokenizer = tiny_tokenizer(["user assistant tool look around"] * 4, markers=markers)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = TEMPLATE
    tokenizer.response_template = qwen3_template
    return tokenizer


def make_model(tokenizer: Any, smollm2: bool) -> Any:
    """SmolLM2 or random weights; after each forward pass the next token of the script is forced."""
    if smollm2:
        return forced(AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32), tokenizer)
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = tiny_config(tokenizer, **shape, max_position_embeddings=4096)
    return forced(Qwen2ForCausalLM(config), tokenizer)


def forced(model: Any, tokenizer: Any) -> Any:
    """The model, whose next tokens are those of the script."""
    chain = [NEXT, OPEN, *WORDS, CLOSE, "<|im_end|>"]
    ids = tokenizer.convert_tokens_to_ids(chain)
    following = torch.full((model.config.vocab_size,), ids[-1])
    following[ids[:-1]] = torch.tensor(ids[1:])
    following[tokenizer.convert_tokens_to_ids(LAST)] = tokenizer.convert_tokens_to_ids(DONE)

    def force(module: Any, args: Any, kwargs: dict[str, Any], out: Any) -> Any:
        last = kwargs["input_ids"][:, -out.logits.size(1) :]
        out.logits.scatter_(2, following[last].unsqueeze(2), 1e4)
        return out

    model.register_forward_hook(force, with_kwargs=True)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


def make_rows(
    episodes: int, *, turns: int | None = None, slow: bool = False, hang: bool = False
) -> list[dict[str, Any]]:
    """Rows of `turns` each, or of 2 to 8, in an order that has nothing to do with their number."""
    draw = random.Random(0)
    return [
        {
            "prompt": [{"role": "user", "content": "look around"}],
            "number": number,
            "turns": turns or draw.randint(2, 8),
            "slow": slow,
            "hangs": hang and number % 32 == 5,
        }
        for number in range(episodes)
    ]


class _Played(Exception):
    """Carries what was generated out of the trainer, before rewards and log-probabilities."""


class _StoppingTRL(GRPOTrainer):
    def _generate(self, prompts: Any) -> Any:
        _, ids, mask, *_ = super()._generate(prompts)
        raise _Played(ids, mask, None, time.perf_counter())


class _StoppingPlayer(EpisodePlayer):
    def play(self, *args: Any, **kwargs: Any) -> Any:
        rollout = super().play(*args, **kwargs)
        ended, episodes = time.perf_counter(), rollout.episodes
        ids, mask = [e.ids for e in episodes], [e.action_mask for e in episodes]
        raise _Played(ids, mask, rollout.durations.waiting, ended)


class _StoppingOurs(PPOTrainer):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loop.source.player.__class__ = _StoppingPlayer


def make_trainer(
    kind: str, model: Any, tokenizer: Any, rows: list[dict[str, Any]], folder: str, **options: Any
) -> Any:
    """Either trainer, stopping after generation."""
    ours = kind == "ours"
    stopping, config = (_StoppingOurs, PPOConfig) if ours else (_StoppingTRL, GRPOConfig)
    extra = {"num_generations": 1, "kl_coef": 0.0} if ours else {"num_generations": 2}
    settings = {"per_device_train_batch_size": 8, "max_completion_length": 2500, **extra, **options}
    cpu = {"use_cpu": True, "bf16": False, "gradient_checkpointing": False}
    return stopping(
        model=copy.deepcopy(model),
        args=config(folder, **QUIET, **cpu, **settings),
        train_dataset=Dataset.from_list(rows),
        processing_class=copy.deepcopy(tokenizer),
        environment_factory=LookEnv,
        reward_funcs=[] if ours else None,
    )


def play(trainer: Any, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """One rollout; seconds, tokens, and the share of time spent waiting for environments."""
    waited = [0.0]
    original = LookEnv.look

    @functools.wraps(original)
    def timed(self: LookEnv, place: str) -> str:
        started = time.perf_counter()
        try:
            return original(self, place)
        finally:
            waited[0] += time.perf_counter() - started

    # TRL calls tools one after the other, so that the sum is what its loop waits.
    if not isinstance(trainer, PPOTrainer):
        LookEnv.look = timed  # type: ignore[method-assign]
    trainer.model.train()
    started, cpu = time.perf_counter(), time.process_time()
    try:
        trainer._generate_and_score_completions(copy.deepcopy(rows))
    except _Played as played:
        completion_ids, mask, waiting, ended = played.args
    finally:
        LookEnv.look = original  # type: ignore[method-assign]
    waited[0] = waited[0] if waiting is None else waiting
    seconds = ended - started
    return {
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "episodes_per_second": len(rows) / seconds,
        "tokens_per_second": sum(map(sum, mask)) / seconds,
        "env_wait_share": waited[0] / seconds,
        "ids": completion_ids,
        "sampled": sum(map(sum, mask)),
        "observed": sum(len(m) - sum(m) for m in mask),
    }


def floor(model: Any, tokenizer: Any, figures: dict[str, Any], episodes: int) -> float:
    """Seconds of one `generate` over as many sampled tokens, observations in the prompt."""
    sampled = round(figures["sampled"] / episodes)
    prompt = tokenizer.convert_tokens_to_ids([FILL] * round(figures["observed"] / episodes + 8))
    ids = torch.tensor([[*prompt, tokenizer.convert_tokens_to_ids(NEXT)]] * episodes)
    plain = copy.deepcopy(model).eval()
    plain._forward_hooks.clear()
    started = time.perf_counter()
    with torch.no_grad():
        out = plain.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=sampled,
            max_new_tokens=sampled,
            do_sample=True,
            pad_token_id=tokenizer.pad_token_id,
        )
    assert out.size(1) == ids.size(1) + sampled
    return time.perf_counter() - started


def case(
    name: str,
    title: str,
    trainers: dict[str, Any],
    rows: list[dict[str, Any]],
    repeats: int,
) -> dict[str, Any]:
    """Both loops in turn: medians, the median of the paired ratios, and a table of them."""
    runs: dict[str, list[dict[str, Any]]] = {"ours": [], "trl": []}
    for _ in range(repeats):
        for kind in runs:
            runs[kind].append(play(trainers[kind], rows))
    pairs = list(zip(runs["ours"], runs["trl"], strict=True))
    if name != "iii":
        assert all(a["ids"] == b["ids"] for a, b in pairs), "the loops played different episodes"
    result: dict[str, Any] = {
        kind: {
            key: statistics.median(run[key] for run in runs[kind])
            for key in ("seconds", "episodes_per_second", "tokens_per_second", "env_wait_share")
        }
        for kind in runs
    }
    result["speedup"] = statistics.median(b["seconds"] / a["seconds"] for a, b in pairs)
    table = [
        [
            kind,
            f"{result[kind]['seconds']:.2f}",
            f"{result[kind]['episodes_per_second']:.2f}",
            f"{result[kind]['tokens_per_second']:.0f}",
            f"{result[kind]['env_wait_share']:.0%}",
        ]
        for kind in runs
    ]
    title = f"{name}: {len(rows)} episodes, {title}; speed-up {result['speedup']:.2f}"
    show(title, ("", "seconds", "episodes/s", "tokens/s", "env wait"), table)
    return result


def main() -> None:
    """Run the cases and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="under a minute on two cores")
    parser.add_argument("--episodes", type=int, help="episodes per rollout")
    parser.add_argument("--repeats", type=int, help="pairs per case")
    parser.add_argument("--model", choices=["smollm2"])
    options = parser.parse_args()
    if options.model:
        LookEnv.words = 46
    episodes = options.episodes or (8 if options.quick or options.model else 128)
    repeats = options.repeats or (1 if options.quick else 3)
    LookEnv.hang_seconds = 5.0 if options.quick else 30.0
    patience = LookEnv.hang_seconds / 10
    logging.set_verbosity_error()
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, bool(options.model))
    with tempfile.TemporaryDirectory() as folder:
        common = (model, tokenizer, make_rows(32), folder)
        trainers = {kind: make_trainer(kind, *common) for kind in ("ours", "trl")}
        # These warm up.
        for trainer in trainers.values():
            play(trainer, make_rows(2))
        rows = make_rows(episodes)
        cases = {"i": case("i", "tools answer at once", trainers, rows, repeats)}
        pairs = []
        for _ in range(repeats):
            figures = play(trainers["ours"], make_rows(episodes, turns=5))
            pairs.append((figures["seconds"], floor(model, tokenizer, figures, episodes)))
        ours, plain = map(statistics.median, zip(*pairs, strict=True))
        over = statistics.median(a / b for a, b in pairs) - 1
        cases["floor"] = {"ours": ours, "generate": plain, "over": over}
        print(f"episodes of 5 turns: {ours:.2f} s; plain generate {plain:.2f} s; ours {over:+.0%}")
        if not options.model:
            rows = make_rows(min(episodes, 32), slow=True)
            cases["ii"] = case("ii", "tools take 20 to 200 ms", trainers, rows, repeats)
            hanging = make_trainer("ours", *common, env_timeout_seconds=patience)
            title = f"one hangs for {LookEnv.hang_seconds:.0f} s, ours gives up after {patience} s"
            rows = make_rows(min(episodes, 32), hang=True)
            cases["iii"] = case("iii", title, {**trainers, "ours": hanging}, rows, 1)
    finish({"threads": torch.get_num_threads(), "episodes": episodes, **cases})


if __name__ == "__main__":
    main()
