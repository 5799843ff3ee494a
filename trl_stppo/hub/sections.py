"""The sections of a model card, each from facts to Markdown; empty where there is nothing to say."""

from __future__ import annotations

import ast
import json
import pprint
from collections.abc import Sequence

from .facts import CardFacts, EnvironmentFacts
from .markdown import code, escaped, fenced, plain, prose, table
from .results import Evaluation, results_table
from .settings import AGENT_FILE, CRITIC_FOLDER

HUB = "https://huggingface.co"


def quoted(name: str) -> str:
    """A string of Python."""
    return json.dumps(plain(name), ensure_ascii=False)


def literal(value: object) -> str:
    """A value as Python, a line per entry."""
    text = json.dumps(value, indent=4, ensure_ascii=False)
    try:
        same = ast.literal_eval(text) == value
    except ValueError:  # JSON's true, false and null
        same = False
    return text if same else pprint.pformat(value, width=80, sort_dicts=False)


def introduction(facts: CardFacts) -> str:
    """What this is, in a few lines."""
    paper = f" ([{plain(facts.paper)}]({HUB}/papers/{plain(facts.paper)}))" if facts.paper else ""
    variant = f", variant {code(facts.variant)}" if facts.variant else ""
    kind = f"A {plain(facts.adapter)} adapter" if facts.adapter else "A language model"
    base = _link(facts.base_model) if facts.base_model else "a model that is not on the Hub"
    on = "on" if facts.adapter else "fine-tuned from"
    data = ", ".join(_link(name, "datasets/") for name in facts.datasets)
    return (
        f"{kind} {on} {base}, trained as an agent over several turns with "
        f"{escaped(facts.method)}{paper}{variant}{' on ' + data if data else ''}, by "
        f"{code(facts.trainer)} of `trl-stppo`, on [TRL](https://github.com/huggingface/trl)."
    )


def _link(repo: str, prefix: str = "") -> str:
    """A link to a repository; only names that the Hub allows become one."""
    name = plain(repo)
    safe = all(c.isascii() and (c.isalnum() or c in "-_./") for c in name)
    return f"[{escaped(name)}]({HUB}/{prefix}{name})" if safe else escaped(name)


def usage(facts: CardFacts) -> str:
    """Code that runs the agent."""
    lines = ["from trl_stppo import Agent"]
    environment = facts.environments[0] if facts.environments else None
    note = ""
    if environment is not None and environment.importable:
        lines.append(f"from {environment.module} import {environment.class_name}")
    elif environment is not None:
        note = (
            f"Put your own copy of {code(environment.class_name, 80)} in place of "
            f"`YourEnvironment`: the repository holds no code.\n\n"
        )
    lines += ["", f"agent = Agent.from_pretrained({quoted(facts.repo)})"]
    if environment is not None:
        name = environment.class_name if environment.importable else "YourEnvironment"
        factory = name if environment.name is None else f"{{{quoted(environment.name)}: {name}}}"
        row = literal(dict(facts.example))
        lines += (
            [f"row = {row}", f"episode = agent.run({factory}, row)"]
            if facts.example
            else [f"episode = agent.run({factory})"]
        )
        lines += ["print(episode.messages, episode.score, episode.stop_reason)"]
    else:
        prompt = facts.example.get("prompt")
        messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": "Hello"}]
        lines += [
            f"messages = {literal(messages)}",
            "print(agent.act(messages))",
        ]
    return f"## Run the agent\n\n{note}{fenced(chr(10).join(lines), 'python')}\n\n{_plainly(facts)}"


def _plainly(facts: CardFacts) -> str:
    loads = "AutoPeftModelForCausalLM" if facts.adapter else "AutoModelForCausalLM"
    package = "peft" if facts.adapter else "transformers"
    return (
        f"{code(AGENT_FILE)} holds limits, sampling and the rest with which the run evaluated, so that "
        f"an agent plays as it did there. The policy alone loads with `{loads}` of `{package}`."
    )


def environments(facts: CardFacts) -> str:
    """Where the agent has learned to act."""
    parts = [_environment(each) for each in facts.environments]
    if facts.tools:
        listed = "\n".join(f"- {code(name)}: {prose(about, 200)}" for name, about in facts.tools)
        parts.append(f"Tools that belong to no environment:\n\n{listed}")
    if facts.limits:
        parts.append(
            table(
                ["limit of an episode", ""], [[name, code(value)] for name, value in facts.limits]
            )
        )
    if facts.system_prompt:
        parts.append("System prompt of the rows:\n\n" + fenced(facts.system_prompt, "text", 1500))
    return "## Environment\n\n" + "\n\n".join(parts) if parts else ""


def _environment(facts: EnvironmentFacts) -> str:
    named = f" ({code(facts.name)} in the rows' `environment` column)" if facts.name else ""
    protocol = {
        "text": "It reads the agent's words: `reset(**row)`, then `step(text)` for each turn.",
        "tools": "The agent calls its methods as tools.",
    }[facts.kind]
    about = prose(facts.description, 500)
    text = f"**{code(facts.class_name, 80)}**{named}: {about or 'no description.'}\n\n{protocol}"
    for name, line in facts.tools:
        text += f"\n- {code(name)}: {prose(line, 200)}"
    return text


def results(found: Sequence[Evaluation], picture: str | None, why_not: str | None) -> str:
    """Evaluation and learning curves."""
    parts = []
    if found:
        parts.append(
            f"Evaluation after {found[0].step} optimizer steps, every episode counted once; in brackets "
            f"the 95 % interval.\n\n{results_table(found)}"
        )
    if picture:
        parts.append(f"![Learning curves of the run]({picture})")
    elif why_not:
        parts.append(why_not)
    return "## Results\n\n" + "\n\n".join(parts) if parts else ""


def settings(facts: CardFacts) -> str:
    """The settings that matter."""
    rows = [[code(name), code(value, 120)] for name, value in facts.settings]
    return "### Settings\n\n" + table(["option", "value"], rows) if rows else ""


def files(facts: CardFacts) -> str:
    """What is in the repository, and how to train on."""
    what = "the policy's adapter" if facts.adapter else "the policy"
    lines = [f"- root: {what}, its tokenizer, {code(AGENT_FILE)}"]
    argument = ""
    if facts.critic:
        shape = {
            "shared": "an adapter and a value head on the policy's backbone",
            "separate": "a sequence-classification model with one output",
        }[facts.critic]
        lines.append(f"- {code(CRITIC_FOLDER + '/')}: the critic, {shape}")
        argument = f", value_model={quoted(facts.repo)}"
    lines.append(
        "- `last-checkpoint/`, `checkpoint-*/`, if any: states from which the run can go on"
    )
    call = f"{facts.trainer}(model={quoted(facts.repo)}{argument}, **the_rest)"
    critic = " and its critic" if facts.critic else ""
    return (
        "## Files\n\n"
        + "\n".join(lines)
        + f"\n\nA new run starts from this policy{critic} with\n\n"
        f"{fenced(f'trainer = {call}', 'python')}"
    )
