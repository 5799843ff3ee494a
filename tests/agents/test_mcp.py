"""Tools of a local MCP server, over stdio."""

import asyncio
import functools
import sys
from pathlib import Path

import psutil
import pytest
from datasets import Dataset

from tests.kit.builders import Kept, build
from tests.kit.waiting import wait_until
from trl_stppo.envs import check_env
from trl_stppo.envs.adapters import McpEnv
from trl_stppo.envs.base import tool_names, tool_schema

pytestmark = pytest.mark.agents
SERVER = str(Path(__file__).with_name("mcp_server.py"))


@pytest.fixture
def make():
    pytest.importorskip("mcp")
    return functools.partial(McpEnv, sys.executable, [SERVER])


def processes() -> int:
    """Servers of this process that run."""
    children = psutil.Process().children(recursive=True)
    return sum(SERVER in child.cmdline() for child in children if child.status() != "zombie")


def test_names_descriptions_and_schemas_are_the_servers(make):
    env = make()
    assert tool_names(env) == ["add", "count", "far-away"]
    add, count, far = (tool_schema(getattr(env, name))["function"] for name in tool_names(env))
    assert add["description"].startswith("Add two numbers.")
    assert add["parameters"]["required"] == ["a"]
    assert add["parameters"]["properties"]["b"] == {"default": 1, "title": "B", "type": "integer"}
    assert count["parameters"]["properties"] == {}
    assert far["name"] == "far-away"
    assert far["parameters"]["required"] == ["point", "unit"]
    assert far["parameters"]["properties"]["unit"]["enum"] == ["m", "km"]
    assert far["parameters"]["$defs"]["Point"]["properties"]["x"]["type"] == "integer"
    env.close()


def test_calls_are_answered_and_close_ends_the_process_of_one_environment(make):
    assert processes() == 0
    servers = [make(), make()]
    assert processes() == 2

    async def play(one, other):
        assert await one.add(a=2, b=3) == "5"
        assert await one.add(a=2) == "3"
        assert await one.count() == "2"
        assert await other.count() == "0"
        far = getattr(one, "far-away")
        assert await far(point={"x": 3, "y": 4}, unit="m") == "25 m None"
        with pytest.raises(RuntimeError, match="executing tool add"):
            await one.add(a=13)
        one.close()
        assert processes() == 1
        assert await other.add(a=1) == "2"

    asyncio.run(play(*servers))
    servers.clear()
    assert wait_until(lambda: processes() == 0)


def test_it_keeps_the_contract(make):
    assert check_env(make, actions=[("add", {"a": 2})]) == []


def test_a_server_that_does_not_start_is_an_error():
    pytest.importorskip("mcp")
    with pytest.raises(ConnectionError, match="no-such-program"):
        McpEnv("no-such-program")


class Adding(McpEnv):
    """Rewards the calls."""

    def reset(self, **row):
        return None

    def get_reward(self):
        return 1.0


def test_a_policy_calls_the_tools_of_a_server_in_a_training(make, tmp_path):
    from taught import taught, tool_call

    user = {"role": "user", "content": "what is 2 and 3"}
    names = [{"type": "function", "function": {"name": n}} for n in ("add", "count", "far-away")]
    done = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
    after = [
        user,
        {"role": "assistant", "content": "", "tool_calls": [done]},
        {"role": "tool", "content": "5", "name": "add"},
    ]
    calls = [([user], names, tool_call("add", '{"a": 2, "b": 3}')), (after, names, "it is 5")]
    model, tokenizer = taught(calls)
    arguments = {
        "environment_factory": functools.partial(Adding, *make.args), "model": model,
        "processing_class": tokenizer, "train_dataset": Dataset.from_dict({"prompt": [[user]] * 4}),
    }  # fmt: skip
    trainer = build(
        tmp_path, Kept, arguments=arguments, max_steps=3, num_mini_batches=1,
        gradient_accumulation_steps=1, max_turns=4, max_turn_tokens=40, max_completion_length=200,
        temperature=0.7, learning_rate=1e-4,
    )  # fmt: skip
    trainer.train()
    episodes = [episode for rollout in trainer.rollouts for episode in rollout.episodes]
    texts = [tokenizer.decode(episode.ids) for episode in episodes]
    assert sum("<|im_start|>tool\n5<|im_end|>" in text for text in texts) >= 9
    assert not [episode.error for episode in episodes if episode.error]
    assert processes() == 4
    trainer._player.engine.close()
    assert processes() == 0
