"""The settings to play an agent with, saved as `agent.json` beside its policy."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from ...generation.sampling import SamplingSettings
from ...hub.settings import AgentSettings
from ...rollout.episode import Limits
from ..bridge import Bridge
from ..describe import name_of
from ..evaluation.settings import SAMPLING
from ..loop.sampler import sampling_settings
from ..planning.plan import RolloutPlan


def agent_settings(host: Bridge, rollout: RolloutPlan, limits: Limits) -> AgentSettings:
    """Return the agent's settings, taken from the trainer's evaluation."""
    args, fields = host.args, dataclasses.asdict(limits)
    model = host.accelerator.unwrap_model(host.model)
    quantization: Any = getattr(model.config, "quantization_config", None)
    # The model has this limit itself.
    del fields["max_context_tokens"]
    return AgentSettings(
        max_completion_length=fields.pop("max_completion_tokens"),
        **fields,
        sampling=_sampling(host),
        eos_token_ids=[int(i) for i in host.eos_token_ids],
        chat_template_kwargs=_as_json(host.chat_template_kwargs or {}),
        agent_context=args.agent_context,
        environments=[
            {
                "name": name,
                "kind": "text" if name in rollout.text else "tools",
                "class": type(probe).__qualname__,
                "import": f"{type(probe).__module__}:{type(probe).__qualname__}",
            }
            for name, probe in rollout.probes.items()
        ],
        tools=[name_of(tool) for tool in rollout.standalone_tools],
        trainer=type(host).__name__,
        dtype=str(model.dtype).removeprefix("torch."),
        quantization=_as_json(quantization.to_dict()) if hasattr(quantization, "to_dict") else None,
        seed=args.seed,
    )


def _as_json(value: Any) -> Any:
    return json.loads(json.dumps(value, default=str))


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
