"""The settings to play an agent with, saved as `agent.json` beside its policy."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...generation.sampling import SamplingSettings
from ...hub.settings import AgentSettings
from ...rollout.episode import Limits
from ..bridge import Bridge
from ..describe import Description, as_json
from ..evaluation.settings import SAMPLING
from ..loop.sampler import sampling_settings


def agent_settings(host: Bridge, run: Description, limits: Limits) -> AgentSettings:
    """Return the agent's settings, taken from the trainer's evaluation."""
    args, fields = host.args, dataclasses.asdict(limits)
    # The model has this limit itself.
    del fields["max_context_tokens"]
    return AgentSettings(
        max_completion_length=fields.pop("max_completion_tokens"),
        **fields,
        sampling=_sampling(host),
        eos_token_ids=[int(i) for i in host.eos_token_ids],
        chat_template_kwargs=as_json(host.chat_template_kwargs or {}),
        agent_context=args.agent_context,
        environments=run.environments,
        tools=run.tools,
        trainer=run.trainer,
        dtype=run.dtype,
        quantization=run.quantization,
        seed=args.seed,
    )


def _sampling(host: Bridge) -> dict[str, Any]:
    """Return sampling settings of evaluation, with training's temperature if evaluation is greedy."""
    args = host.args
    names = [f.name for f in dataclasses.fields(SamplingSettings) if f.name != "do_sample"]
    settings = None if host.use_vllm else sampling_settings(host)[0]
    known = {name: getattr(settings or args, name) for name in names}
    overrides = {name: args.eval_settings[name] for name in SAMPLING if name in args.eval_settings}
    if overrides.get("temperature") == 0:
        del overrides["temperature"]
    return known | overrides
