"""Tiny models that are float64 throughout, and episodes played on a backend in random order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen2Config, Qwen3Config

from trl_stppo.generation.cached import CachedBackend
from trl_stppo.generation.protocol import TurnRequest, TurnResult
from trl_stppo.generation.sampling import SamplingSettings

VOCABULARY = 24
ENDS = [4, 10, 11]
GREEDY = SamplingSettings(do_sample=False)


def tiny_model(kind: str = "gpt2", attention: str = "sdpa", vocabulary: int = VOCABULARY):
    """Two random layers with logits far enough apart to have opinions."""
    common = {"vocab_size": vocabulary, "bos_token_id": None, "eos_token_id": None}
    common |= {"pad_token_id": 0, "initializer_range": 0.5, "attn_implementation": attention}
    rotary = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    rotary |= {"num_attention_heads": 4, "max_position_embeddings": 256, **common}
    torch.manual_seed(0)
    if kind == "gpt2":
        config = GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=256, **common)
    elif kind == "llama":
        config = LlamaConfig(num_key_value_heads=2, **rotary)
    elif kind == "qwen3":
        config = Qwen3Config(num_key_value_heads=2, head_dim=4, **rotary)
    else:
        config = Qwen2Config(num_key_value_heads=4, **rotary)
    return exact_norms(AutoModelForCausalLM.from_config(config).double().eval())


def exact_norms(model):
    """Keep the norms in float64; as they come they round to float32 inside."""

    def forward(states, norm):
        variance = states.pow(2).mean(-1, keepdim=True)
        return norm.weight * states * torch.rsqrt(variance + norm.variance_epsilon)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda states, norm=module: forward(states, norm)
    return model


def backend_of(model, sampling: SamplingSettings = GREEDY, ends=ENDS, **options) -> CachedBackend:
    return CachedBackend(model, sampling, list(ends), pad_token_id=0, **options)


@dataclass
class Episode:
    """A prompt, the observations after each turn but the last, and what was sampled."""

    key: int
    prompt: list[int]
    observations: list[list[int]]
    limits: list[int]
    ids: list[int] = field(default_factory=list)
    turns: list[TurnResult] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)

    def request(self) -> TurnRequest:
        turn = len(self.turns)
        if turn == 0:
            self.ids = list(self.prompt)
        self.starts.append(len(self.ids))
        return TurnRequest(self.key, list(self.ids), self.limits[turn], (7, self.key, turn))

    def accept(self, result: TurnResult) -> bool:
        """Whether another turn follows."""
        self.turns.append(result)
        self.ids += result.ids
        if len(self.turns) == len(self.limits):
            return False
        self.ids += self.observations[len(self.turns) - 1]
        return True


def episodes(count: int = 9, turns: int = 3, seed: int = 0, limit: int = 9) -> list[Episode]:
    """Prompts, observations and limits of all lengths, empty observations included."""
    rng = random.Random(seed)

    def some(low: int, high: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(rng.randint(low, high))]

    def made(key: int) -> Episode:
        prompt, observations = some(1, 30), [some(0, 12) for _ in range(turns - 1)]
        return Episode(key, prompt, observations, [rng.randint(1, limit) for _ in range(turns)])

    return [made(key) for key in range(count)]


def play(backend, todo: list[Episode], seed: int | None = None) -> dict[int, list[TurnResult]]:
    """Play episodes to their end; with a seed, requests arrive late and in any order.

    Returns:
        the turns of each episode; `backend.midway` counts requests that came while others ran.
    """
    rng = random.Random(seed)
    patience = 0.0 if seed is None else 0.5
    waiting, ready, flying = list(todo), [], {}
    if seed is not None:
        rng.shuffle(waiting)
    backend.midway = 0
    while waiting or ready or flying:
        alive = len(ready) + len(flying)
        while waiting and (backend.capacity is None or alive < backend.capacity):
            ready.append(waiting.pop())
            alive += 1
        for episode in list(ready):
            if rng.random() >= patience:
                ready.remove(episode)
                backend.midway += bool(flying)
                flying[episode.key] = episode
                backend.add(episode.request())
        for result in backend.step():
            episode = flying.pop(result.key)
            if episode.accept(result):
                ready.append(episode)
            else:
                backend.release(result.key)
    assert not backend.busy
    return {episode.key: episode.turns for episode in todo}


def generated(model, ids: list[int], limit: int, ends=ENDS) -> list[int]:
    """One greedy turn of one episode by `generate`."""
    row = torch.tensor([ids])
    with torch.no_grad():
        options = {"do_sample": False, "max_new_tokens": limit, "eos_token_id": list(ends)}
        mask = torch.ones_like(row)
        out = model.generate(input_ids=row, attention_mask=mask, pad_token_id=0, **options)
    return out[0, len(ids) :].tolist()


def ids_of(turns: dict[int, list[TurnResult]]) -> dict[int, list[list[int]]]:
    return {key: [turn.ids for turn in of_key] for key, of_key in turns.items()}
