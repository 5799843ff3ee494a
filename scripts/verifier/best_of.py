"""Evaluate an agent that samples several turns in each state and plays the best one (docs/evaluation.md).

`--by` names who scores the turns: 'critic' for the one saved with the agent, module:function for a function
`(prompts, completions)`, or a causal model that answers yes or no. Other flags are those of `evaluate`.

    python scripts/verifier/best_of.py --candidates 8 --by critic --config scripts/configs/demo.yaml
"""

from __future__ import annotations

import argparse
import dataclasses
import pkgutil
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trl_stppo import Agent
from trl_stppo.cli.evaluate import compare
from trl_stppo.generation.protocol import Backend, TurnRequest, TurnResult
from trl_stppo.hub.loading import critic_folder
from trl_stppo.models.critic import HEAD_FILE, Critic, SeparateCritic
from trl_stppo.models.critic_models import critic_from_checkpoint
from trl_stppo.paths import CRITIC_FOLDER
from trl_stppo.trainer.setup.models import shared_critic

Rows = list[list[int]]
# Tokens before the turns, tokens of the turns -> one score per turn.
Scores = Callable[[Rows, Rows], Sequence[float]]
TEMPLATE = """You judge single steps of an agent. What has happened so far:
{}

The agent's next step:
{}

Does this step bring the agent closer to solving the task? Answer with yes or no alone.\n"""


class BestOf(Backend):
    """Backend that samples `candidates` turns with another backend and returns the first of the best."""

    def __init__(self, backend: Backend, candidates: int, scores: Scores) -> None:
        if candidates < 2:
            raise ValueError(f"`candidates={candidates}`: must be >= 2.")
        self._backend, self._candidates, self._scores = backend, candidates, scores
        self.capacity = backend.capacity and max(1, backend.capacity // candidates)
        self.whole_batches = getattr(backend, "whole_batches", False)
        self._requests: dict[int, TurnRequest] = {}
        self._sampled: dict[int, dict[int, TurnResult]] = {}

    @property
    def busy(self) -> bool:
        """Whether the other backend has work to do."""
        return self._backend.busy

    def add(self, request: TurnRequest) -> None:
        """Request the candidates, each with a seed of its own."""
        self._requests[request.key], self._sampled[request.key] = request, {}
        for number, key in enumerate(self._keys(request.key)):
            seed = (*request.seed, number)
            self._backend.add(dataclasses.replace(request, key=key, seed=seed))

    def step(self) -> list[TurnResult]:
        """Run a step of the other backend; return the best turn of each complete request."""
        complete = []
        for result in self._backend.step():
            key, number = divmod(result.key, self._candidates)
            self._sampled[key][number] = result
            if len(self._sampled[key]) == self._candidates:
                complete.append(key)
        turns = [(key, n) for key in complete for n in self._sampled[key]]
        ids = [self._sampled[key][n].ids for key, n in turns]
        values = self._scores([self._requests[key].ids for key, _ in turns], ids) if ids else []
        scores, every = dict(zip(turns, values, strict=True)), range(self._candidates)
        best = {k: max(every, key=lambda n: scores[k, n]) for k in complete}
        return [self._played(key, number) for key, number in best.items()]

    def release(self, key: int) -> None:
        """Drop an episode and all its candidates. Unknown keys are ignored."""
        self._requests.pop(key, None)
        self._sampled.pop(key, None)
        for each in self._keys(key):
            self._backend.release(each)

    def _keys(self, key: int) -> range:
        return range(key * self._candidates, (key + 1) * self._candidates)

    def _played(self, key: int, best: int) -> TurnResult:
        del self._requests[key]
        for number, each in enumerate(self._keys(key)):
            if number != best:
                # The row does not continue with this turn.
                self._backend.release(each)
        return dataclasses.replace(self._sampled.pop(key)[best], key=key)


def padded(rows: Rows, device: Any, size: int = 16) -> Iterator[tuple[torch.Tensor, Any, Any]]:
    """Yield batches of rows, padded on the right: tokens, mask, and each row's last position."""
    for start in range(0, len(rows), size):
        longest = max(map(len, part := rows[start : start + size]))
        # A causal model does not attend to what follows, so any token pads.
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in part], device=device)
        ends = torch.tensor([len(row) - 1 for row in part], device=device)
        yield ids, (torch.arange(longest, device=device) <= ends[:, None]).long(), ends


def critic_scores(critic: Critic) -> Scores:
    """Return a function that scores a turn by the critic's value in the last state that it is trained on."""

    @torch.no_grad()
    def scores(rows: Rows, turns: Rows) -> list[float]:
        states = [row + ids[: max(1, len(ids) - 1)] for row, ids in zip(rows, turns, strict=True)]
        values = list[float]()
        with critic.active():
            for ids, mask, ends in padded(states, critic.parameters()[0].device):
                last = critic.hidden_states(ids, mask)[range(len(ids)), ends]
                values += critic.score(last.unsqueeze(1)).squeeze(1).tolist()
        return values

    return scores


def critic_of(name: str, policy: Any) -> Critic:
    """Load the critic that was saved with an agent, from its folder or repository."""
    folder = critic_folder(name, CRITIC_FOLDER)
    if folder is None:
        raise FileNotFoundError(f"`by=critic`: {name!r} has no folder `{CRITIC_FOLDER}`.")
    if (folder / HEAD_FILE).is_file():
        return shared_critic(policy, folder)
    model = critic_from_checkpoint(str(folder), dtype=policy.dtype)
    return SeparateCritic(model.to(policy.device).eval())


def label_scores(model: Any, tokenizer: Any) -> Callable[..., list[float]]:
    """Return a function for `turn_reward_funcs`: P(yes) / (P(yes) + P(no)) of a causal model's answer.

    Source: GUI-Shepherd, arXiv:2509.23738; its model sees the screen instead.
    """
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))

    def row(before: str, turn: str) -> list[int]:
        short = f"{before[:4000]}\n[...]\n{before[-4000:]}" if len(before) > 8000 else before
        text = TEMPLATE.format(short, turn)
        if tokenizer.chat_template is not None:
            turns = [{"role": "user", "content": text}]
            text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return tokenizer.encode(text, add_special_tokens=False)

    @torch.inference_mode()
    def labels(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        rows, values = list(map(row, map(_text, prompts), map(_text, completions))), list[float]()
        for ids, mask, ends in padded(rows, model.device):
            logits = model(input_ids=ids, attention_mask=mask).logits[range(len(ids)), ends].float()
            values += torch.sigmoid(logits[:, yes] - logits[:, no]).tolist()
        return values

    return labels


def _text(turns: Any) -> str:
    if isinstance(turns, str):
        return turns
    lines = [f"{m['role']}: {m.get('content') or ''}{m.get('tool_calls') or ''}" for m in turns]
    return "\n".join(lines)


def of_texts(name: str, tokenizer: Any, device: Any) -> Scores:
    """Return the scores of a named function or model, which gets texts without control tokens."""
    if ":" in name:
        judge = pkgutil.resolve_name(name)
    else:
        model = AutoModelForCausalLM.from_pretrained(name).to(device).eval()
        judge = label_scores(model, AutoTokenizer.from_pretrained(name))
    decode = partial(tokenizer.batch_decode, skip_special_tokens=True)
    return lambda rows, turns: judge(prompts=decode(rows), completions=decode(turns))


def main(words: Sequence[str] | None = None) -> dict[str, Any]:
    """Evaluate, and return the metrics by agent and data set."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--candidates", type=int, required=True, help="turns in each state")
    parser.add_argument("--by", metavar="NAME", required=True, help="who scores the turns")
    own, others = parser.parse_known_args(words)

    def wrapper(agent: Agent, name: str) -> Callable[[Backend], Backend]:
        if own.by == "critic":
            scores = critic_scores(critic_of(name, agent.model))
        else:
            scores = of_texts(own.by, agent.tokenizer, agent.model.device)
        return lambda backend: BestOf(backend, own.candidates, scores)

    return compare(others, wrapper)


if __name__ == "__main__":
    main()
