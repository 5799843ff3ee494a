"""A rollout_func whose episodes rewrite their contexts."""

from typing import Any

import torch

from tests.kit.scripted import play_script


def cut_script(prompts: list[str], trainer: Any = None, *, all_turns: bool = False) -> dict[str, Any]:
    """The episodes of `play_script`; some turns begin a context of their own, or all of them do.

    The number of a prompt decides, so that processes have other numbers of contexts.
    """
    whole = play_script(prompts)
    output: dict[str, Any] = {key: [] for key in (*whole, "episode_of") if key != "logprobs"}
    for n, prompt in enumerate(prompts):
        number, ids = int(prompt), whole["completion_ids"][n]
        draw = torch.Generator().manual_seed(5000 + number)
        before = whole["prompt_ids"][n]
        start = 0
        for turn, (first, end) in enumerate(whole["turn_spans"][n]):
            new = turn == 0 or all_turns or (number + turn) % 3 == 0
            if new:
                start = first
                if turn:
                    before = torch.randint(3, 90, (2 + turn,), generator=draw).tolist()
                output["prompt_ids"].append(before)
                output["completion_ids"].append([])
                output["turn_spans"].append([])
                output["turn_rewards"].append([])
                output["episode_of"].append(n)
            output["completion_ids"][-1] = ids[start:end]
            output["turn_spans"][-1].append((first - start, end - start))
            output["turn_rewards"][-1].append(whole["turn_rewards"][n][turn])
    return {**output, "logprobs": None}
