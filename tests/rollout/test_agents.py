"""Agents that own their loop: what they send, what they get, and how they fail."""

import asyncio
import functools
import threading
import time
from decimal import Decimal
from typing import Any

import numpy as np
import openai
import pytest
import torch

from tests.kit.builders import Kept, build, logs, prompts
from tests.kit.fakes import char_tokenizer
from tests.kit.rollout_kit import RENDERER, ScriptedBackend, parse, says
from trl_stppo import Agent
from trl_stppo.rollout.agent_driver import AgentDriver
from trl_stppo.rollout.engine import RolloutEngine
from trl_stppo.rollout.environments import EnvironmentPool
from trl_stppo.rollout.episode import Limits
from trl_stppo.rollout.workers import EnvironmentCalls

SIZES = {
    "max_steps": 1, "num_mini_batches": 1, "gradient_accumulation_steps": 1, "max_turns": 4,
    "max_turn_tokens": 5, "max_completion_length": 60, "shuffle_dataset": False,
}  # fmt: skip
HI = [{"role": "user", "content": "hi"}]


def played(folder, agent, **options):
    """A trainer that has played one rollout of four episodes."""
    arguments = {
        "agent": agent,
        "train_dataset": options.pop("rows", prompts(4, number=[*range(4)])),
    }
    arguments |= options.pop("arguments", {})
    trainer = build(folder, Kept, arguments=arguments, **{**SIZES, **options})
    trainer.train()
    return trainer


async def ask(client: Any, messages: Any = HI, **options: Any) -> Any:
    return await client.chat.completions.create(model="policy", messages=messages, **options)


def said(answer: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": answer.choices[0].message.content}


# ------------------------------------------------------------------------------- contexts


def test_a_conversation_that_only_grows_is_one_row(tmp_path):
    async def agent(client, row):
        messages = [*HI]
        for _ in range(3):
            messages += [said(await ask(client, messages)), {"role": "user", "content": "more"}]
        return 1.0

    trainer = played(tmp_path, agent)
    for episode in trainer.episodes:
        assert (len(episode.contexts), episode.num_turns) == (1, 3)
        assert episode.stop_reason == "terminated"
        assert episode.turn_rewards == [0.0, 0.0, 1.0]
        tokenizer = trainer.processing_class
        text = tokenizer.decode(episode.prompt_ids + episode.ids)
        assert text.count("more") == 2
    assert logs(trainer)["contexts/mean"] == logs(trainer)["contexts/tokens_ratio"] == 1.0


def test_episodes_without_a_call_are_counted_in_the_log(tmp_path, caplog):
    async def agent(client, row):
        if row["number"]:
            await ask(client)
        return float(row["number"])

    played(tmp_path, agent)
    assert "1 of 4 episodes ended without an answered call" in caplog.text


@pytest.mark.parametrize(("text", "named"), [("x" * 3000, "max_completion_length"), (None, "call")])
def test_a_batch_without_a_turn_is_an_error_that_tells_why(text, named, tmp_path):
    async def agent(client, row):
        if text is not None:
            await ask(client, [{"role": "user", "content": text}])
        return 1.0

    with pytest.raises(ValueError, match="No episode has a turn") as caught:
        played(tmp_path, agent, arguments={"reward_funcs": None})
    assert named in str(caught.value)


def test_rewritten_messages_open_a_context_and_a_parent_goes_on(tmp_path):
    async def agent(client, row):
        parent = [*HI, said(await ask(client))]
        helper = [{"role": "system", "content": "help"}, *HI]
        await ask(client, helper)
        await ask(client, [*parent, {"role": "user", "content": "go on"}])
        await ask(client, [{"role": "user", "content": "so far: much"}])
        return 1.0

    trainer = played(tmp_path, agent)
    for episode in trainer.episodes:
        assert [context.turns for context in episode.contexts] == [[0, 2], [1], [3]]
        assert episode.opened == {"rewritten": 2}
    figures = logs(trainer)
    assert (figures["contexts/mean"], figures["contexts/max"]) == (3.0, 3.0)
    assert (figures["contexts/rewritten"], figures["contexts/branch"]) == (2.0, 0.0)
    assert figures["contexts/tokens_ratio"] > 1
    assert figures["turns/mean"] == 4.0


def test_several_answers_to_one_history_are_branches_that_share_its_tokens(tmp_path):
    async def agent(client, row):
        history = [*HI, said(await ask(client)), {"role": "user", "content": "try"}]
        await asyncio.gather(*(ask(client, history) for _ in range(3)))
        return 1.0

    trainer = played(tmp_path, agent)
    for episode in trainer.episodes:
        first, *branches = episode.contexts
        assert [context.turns for context in episode.contexts] == [[0, 1], [2], [3]]
        assert episode.opened == {"branch": 2}
        start = first.turn_spans[1][0]
        for branch in branches:
            assert branch.prompt_ids == first.prompt_ids + first.ids[:start]
        assert len({tuple(turn) for turn in episode.turns_of_tokens()[1:]}) > 1, "each has its own seed"


def test_an_answer_that_the_agent_has_edited_opens_a_context(tmp_path):
    async def agent(client, row):
        messages = [*HI, said(await ask(client)), *HI]
        await ask(client, messages)
        await ask(client, [*messages, {"role": "assistant", "content": "edited"}, *HI])
        return 1.0

    trainer = played(tmp_path, agent)
    for episode in trainer.episodes:
        assert [context.turns for context in episode.contexts] == [[0, 1], [2]]
        assert "edited" in trainer.processing_class.decode(episode.more[0].prompt_ids)
        assert episode.opened == {"rewritten": 1}


def test_tools_that_the_template_does_not_write_are_warned_of_once(tmp_path, caplog):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}

    async def agent(client, row):
        await ask(client, tools=[tool])
        return 1.0

    played(tmp_path / "without", agent)
    assert len([m for m in caplog.messages if "`tools`" in m]) == 1
    caplog.clear()
    tokenizer = char_tokenizer()
    names = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    tokenizer.chat_template = names + tokenizer.chat_template
    played(tmp_path / "with", agent, arguments={"processing_class": tokenizer})
    assert [m for m in caplog.messages if "`tools`" in m] == []


def test_other_tools_open_a_context(tmp_path):
    async def agent(client, row):
        answer = said(await ask(client))
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        await ask(client, [*HI, answer, *HI], tools=[tool])
        return 1.0

    tokenizer = char_tokenizer()
    tokenizer.chat_template = "{{ tools | length if tools }}" + tokenizer.chat_template
    trainer = played(tmp_path, agent, arguments={"processing_class": tokenizer})
    assert trainer.episodes[0].opened == {"tools": 1}


# ------------------------------------------------------------------------ one call


def test_a_stop_string_ends_the_turn_and_nothing_after_it_is_trained_on(tmp_path):
    seen = []

    async def agent(client, row):
        letters = [chr(c) for c in range(ord("a"), ord("a") + 26)]
        answer = await ask(client, stop=letters)
        seen.append(answer.choices[0])
        await ask(client, [*HI, said(answer), *HI])
        return 1.0

    trainer = played(tmp_path, agent, max_turn_tokens=12)
    decode = trainer.processing_class.decode
    turns = [decode(episode.turns_of_tokens()[0], skip_special_tokens=True) for episode in trainer.episodes]
    cut = [turn for turn in turns if any(c.islower() for c in turn)]
    assert cut, "the case should be interesting"
    for turn in cut:
        assert turn[-1].islower()
        assert not any(c.islower() for c in turn[:-1])
    assert sorted(c.message.content for c in seen) == sorted(
        turn[:-1] if turn in cut else turn for turn in turns
    )
    assert {choice.finish_reason for choice in seen} <= {"stop", "length"}
    assert all(len(episode.contexts) in (1, 2) for episode in trainer.episodes)


def test_usage_and_a_stream_tell_of_the_sampled_tokens(tmp_path):
    found = []

    async def agent(client, row):
        answer = await ask(client)
        stream = await ask(
            client, [*HI, said(answer), *HI], stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        found.append((row["number"], answer, chunks))
        return 1.0

    trainer = played(tmp_path, agent)
    for number, answer, chunks in found:
        episode = trainer.episodes[number]
        (_, end), (_, last) = episode.turn_spans
        usage = answer.usage
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(episode.prompt_ids), end)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        second = episode.ids[episode.turn_spans[1][0] : last]
        assert text == trainer.processing_class.decode(second, skip_special_tokens=True)
        assert chunks[-1].usage.completion_tokens == len(second)


def test_a_call_that_does_not_train_is_no_turn(tmp_path):
    async def agent(client, row):
        answer = await ask(client)
        judged = await ask(client, [*HI, said(answer), *HI], extra_body={"train": False})
        assert judged.choices[0].message.content
        return 0.5

    trainer = played(tmp_path, agent)
    assert [(e.num_turns, len(e.contexts)) for e in trainer.episodes] == [(1, 1)] * 4
    assert all(e.ids == e.turns_of_tokens()[0] for e in trainer.episodes)


# What is asked, what the error names, and its status.
REFUSED = [
    # What would falsify what is trained.
    ({"n": 2}, "n", 400),
    ({"logprobs": True}, "logprobs", 400),
    ({"response_format": {"type": "json_object"}}, "response_format", 400),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice", 400),
    ({"model": "gpt-5"}, "gpt-5", 404),
    ({"messages": []}, "messages", 400),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "image_url", 400),
    *(
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": given}]}]},
            named,
            400,
        )
        for url, named in {
            "http://a.b/c.png": "image_url",
            "file:///etc/passwd": "image_url",
            "data:image/png;base64,AAAA": "base64",
            "data:image/gif;base64,R0lGODlhAQABAIAAAAAAAP///yH5BAEAAAAALAAAAAABAAEAAAIBRAA7": "only text",
        }.items()
        for given in ({"url": url}, url)
    ),
    ({"messages": [{"content": "no role"}]}, "role", 400),
    # What cannot be sampled.
    ({"max_tokens": 0}, "max_tokens", 400),
    ({"max_completion_tokens": -1}, "max_completion_tokens", 400),
    ({"max_tokens": "10"}, "max_tokens", 400),
    ({"stop": ["", "end"]}, "stop", 400),
    ({"stop": [1]}, "stop", 400),
    ({"extra_body": {"train": 0}}, "train", 400),
    # What the template cannot render.
    ({"tools": [1]}, "Tools", 400),
    ({"messages": [{"role": "system", "content": "s"}]}, "no such role", 400),
    ({"messages": [*HI, {"role": "system", "content": "s"}]}, "no such role", 400),
]


def without_system_messages():
    tokenizer = char_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages if m.role == 'system' %}{{ raise_exception('no such role') }}{% endfor %}"
        + tokenizer.chat_template
    )
    return {"processing_class": tokenizer}


async def send(client: Any, options: dict[str, Any]) -> Any:
    return await client.chat.completions.create(**{"model": "policy", "messages": HI, **options})


def test_a_request_that_cannot_be_answered_is_refused_and_its_agent_goes_on(tmp_path):
    errors, count = {}, len(REFUSED)

    async def agent(client, row):
        with pytest.raises(openai.APIStatusError) as caught:
            await send(client, REFUSED[row["number"]][0])
        errors[row["number"]] = caught.value
        await ask(client)
        return 1.0

    trainer = played(
        tmp_path, agent, rows=prompts(count, number=[*range(count)]),
        arguments=without_system_messages(), per_device_train_batch_size=count,
    )  # fmt: skip
    for number, (options, field, status) in enumerate(REFUSED):
        assert errors[number].status_code == status, options
        assert field in str(errors[number]), options
    assert [str(e.stop_reason) for e in trainer.episodes] == ["terminated"] * count


@pytest.mark.parametrize(("options", "rendered"), [({"max_tokens": 0}, False), ({"tools": [1]}, True)])
def test_an_agent_that_does_not_heed_a_refusal_fails(tmp_path, options, rendered):
    """The first repeats the request again and again, the second does not catch the error."""

    async def agent(client, row):
        for _ in range(5 if row["number"] == 0 else 1):
            with pytest.raises(openai.BadRequestError):
                await send(client, options)
        if row["number"] == 1:
            await send(client, options)
        await ask(client)
        return 1.0

    trainer = played(tmp_path, agent)
    reasons = [str(e.stop_reason) for e in trainer.episodes]
    assert reasons == ["env_error" if rendered else "terminated", "env_error", *["terminated"] * 2]


def test_settings_of_sampling_are_the_runs_own(tmp_path, caplog):
    def asks(**options):
        async def agent(client, row):
            await ask(client, **options)
            return 1.0

        return agent

    given = played(tmp_path / "a", asks(temperature=0.1, seed=5, top_p=0.5))
    plain = played(tmp_path / "b", asks())
    assert [e.turns_of_tokens() for e in given.episodes] == [e.turns_of_tokens() for e in plain.episodes]
    assert sum("`temperature`" in record.message for record in caplog.records) == 1


def test_messages_that_do_not_fit_are_refused_so_that_the_agent_can_shorten_them(tmp_path):
    async def agent(client, row):
        await ask(client)
        tries = 3 if row["number"] == 0 else 1
        if row["number"] == 1:
            await ask(client, [{"role": "user", "content": "x" * 3000}])
        for _ in range(tries):
            with pytest.raises(openai.BadRequestError) as caught:
                await ask(client, [{"role": "user", "content": "x" * 3000}])
            assert caught.value.code == "context_length_exceeded"
            assert "`max_completion_length` is 60" in str(caught.value)
        await ask(client)
        return 1.0

    trainer = played(tmp_path, agent)
    assert [str(e.stop_reason) for e in trainer.episodes] == [
        *["token_budget"] * 2, *["terminated"] * 2
    ]  # fmt: skip
    assert [e.num_turns for e in trainer.episodes] == [1, 1, 2, 2]
    assert [e.error for e in trainer.episodes] == [None] * 4


# ------------------------------------------------------------------------------ the end


def test_what_an_agent_returns_is_the_reward(tmp_path):
    results = [
        (2, [0.0, 2.0], None),
        ({"reward": 1.0, "success": True}, [0.0, 1.0], True),
        ({"turn_rewards": [0.5, 0.25]}, [0.5, 0.25], None),
        # Where others are judged, one that was cut off has failed.
        ({"turn_rewards": [0.5, 0.25], "reward": 1.0, "truncated": True}, [0.5, 1.25], False),
    ]

    async def agent(client, row):
        await ask(client, [*HI, said(await ask(client)), *HI])
        return results[row["number"]][0]

    trainer = played(tmp_path, agent)
    for episode, (result, rewards, success) in zip(trainer.episodes, results, strict=True):
        assert episode.turn_rewards == rewards
        assert episode.success is success
        cut = isinstance(result, dict) and result.get("truncated")
        assert str(episode.stop_reason) == ("truncated" if cut else "terminated")


@pytest.mark.long
def test_rewards_by_completion_id_and_reward_functions(tmp_path):
    async def agent(client, row):
        first = await ask(client)
        await ask(client, [*HI, said(first), *HI])
        return {"turn_rewards": {first.id: 3.0}}

    assert played(tmp_path / "ids", agent).episodes[0].turn_rewards == [3.0, 0.0]

    async def silent(client, row):
        await ask(client, [{"role": "system", "content": "s"}, *HI])
        await ask(client)

    given = []

    def score(prompts, completions, number, **kwargs):
        given.extend(zip(prompts, completions, number, strict=True))
        return [1.0] * len(prompts)

    trainer = played(tmp_path / "scored", silent, arguments={"reward_funcs": score})
    assert [number for *_, number in given] == [0, 1, 2, 3]
    prompt, completion, _ = given[0]
    assert [message["role"] for message in prompt] == ["system", "user"]
    assert [message["role"] for message in completion] == ["assistant", "user", "assistant"]
    assert logs(trainer)["episode/score"] == 1.0


def test_turn_reward_functions_get_each_call_with_its_own_messages(tmp_path):
    seen = []

    async def agent(client, row):
        await ask(client)
        await ask(client, [{"role": "user", "content": "anew"}])

    def score(prompts, completions, **kwargs):
        seen.extend(zip(prompts, completions, strict=True))
        return [0.5] * len(prompts)

    trainer = played(tmp_path, agent, arguments={"turn_reward_funcs": score})
    assert [p[-1]["content"] for p, _ in seen] == ["hi", "anew"] * 4
    assert trainer.scored[-1].turn_rewards == [[0.5, 0.5]] * 4


def test_after_its_last_turn_an_agent_is_told_once_and_may_return_a_reward(tmp_path):
    codes = []

    async def agent(client, row):
        try:
            for _ in range(10):
                await ask(client)
        except openai.PermissionDeniedError as error:
            codes.append(error.code)
            if row["number"] == 0:
                return 0.25
            await ask(client)
        raise AssertionError("it is cancelled")

    trainer = played(tmp_path, agent, max_turns=2)
    assert codes == ["episode_over"] * 4
    assert {str(e.stop_reason) for e in trainer.episodes} == {"max_turns"}
    assert [sum(e.turn_rewards) for e in trainer.episodes] == [0.25, 0.0, 0.0, 0.0]
    assert all(e.num_turns == 2 for e in trainer.episodes)


class OwnError(Exception):
    pass


@pytest.mark.long
def test_of_64_agents_the_broken_ones_fail_alone(tmp_path, caplog):
    """One raises, one hangs, one calls after its end, one retries."""
    done = threading.Event()

    async def agent(client, row):
        number = row["number"]
        first = await ask(client, [{"role": "user", "content": f"number {number}"}])
        await asyncio.sleep(0.001 * (number % 7))
        if number == 3:
            raise OwnError("broken")
        if number == 7:
            await asyncio.sleep(60)
        if number == 13:
            asyncio.get_running_loop().create_task(later(client))
        if number == 17:
            same = {"extra_headers": {"x-stainless-retry-count": "1"}}
            again = await ask(client, [{"role": "user", "content": f"number {number}"}], **same)
            assert again.id == first.id
        return float(number)

    async def later(client):
        await asyncio.sleep(0.5)
        with pytest.raises(openai.PermissionDeniedError):
            await ask(client)
        done.set()

    trainer = played(
        tmp_path, agent, rows=prompts(64, number=[*range(64)]), per_device_train_batch_size=64,
        env_timeout_seconds=2.0,
    )  # fmt: skip
    reasons = {e.columns["number"]: str(e.stop_reason) for e in trainer.episodes}
    assert (reasons[3], reasons[7]) == ("env_error", "env_timeout")
    assert "OwnError: broken (test_agents.py:" in trainer.episodes[3].error
    assert "2 of 64 episodes ended in a failure: " in caplog.text
    others = [n for n in reasons if n not in (3, 7)]
    assert {n: r for n in others if (r := reasons[n]) != "terminated"} == {}
    tokenizer = trainer.processing_class
    for number in others:
        episode = trainer.episodes[number]
        assert episode.turn_rewards == [float(number)]
        assert f"number {number}" in tokenizer.decode(episode.prompt_ids)
        assert episode.num_turns == 1
    assert done.wait(5)


@pytest.mark.long
@pytest.mark.parametrize("result", ["text", float("nan"), {"score": 1.0}, {"turn_rewards": [1.0, 2.0]}])
def test_a_result_that_is_no_reward_is_the_agents_error(tmp_path, result):
    async def agent(client, row):
        await ask(client)
        return result if row["number"] == 0 else 1.0

    trainer = played(tmp_path, agent)
    assert [str(e.stop_reason) for e in trainer.episodes] == ["env_error", *["terminated"] * 3]


def test_a_plain_function_runs_beside_others_and_gets_the_plain_client(tmp_path):
    barrier = threading.Barrier(4, timeout=20)

    def agent(client, row):
        barrier.wait()
        answer = client.chat.completions.create(model="policy", messages=HI)
        assert isinstance(client, openai.OpenAI)
        return float(len(answer.choices[0].message.content))

    trainer = played(tmp_path, functools.partial(agent))
    assert {str(e.stop_reason) for e in trainer.episodes} == {"terminated"}


def test_a_judge_may_be_called_after_the_last_turn(tmp_path):
    async def agent(client, row):
        answers = [await ask(client) for _ in range(2)]
        for answer in answers:
            await ask(client, [*HI, said(answer), *HI], extra_body={"train": False})
        return 1.0

    trainer = played(tmp_path, agent, max_turns=2)
    assert {str(e.stop_reason) for e in trainer.episodes} == {"terminated"}
    assert [e.turn_rewards for e in trainer.episodes] == [[0.0, 1.0]] * 4


@pytest.mark.parametrize("kind", ["function", "task"])
def test_a_caller_that_never_stops_is_ended_after_its_episode(tmp_path, kind):
    ends = []

    def agent(client, row):
        try:
            while True:
                try:
                    client.chat.completions.create(model="policy", messages=HI)
                except Exception:
                    continue
        finally:
            ends.append(row["number"])

    async def forever(client, number):
        try:
            while True:
                try:
                    await ask(client)
                except Exception:
                    continue
        finally:
            ends.append(number)

    async def starting(client, row):
        agent.task = asyncio.create_task(forever(client, row["number"]))
        await ask(client)
        return 1.0

    played(tmp_path, agent if kind == "function" else starting, max_turns=2)
    until = time.monotonic() + 10
    while len(ends) < 4 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(ends) == [0, 1, 2, 3]


def test_an_instance_may_be_asynchronous_and_rewards_may_be_numbers_of_any_library(tmp_path):
    class Agent:
        async def __call__(self, client, row):
            await ask(client)
            one = [np.float32(1), torch.tensor(1.0), Decimal(1), True][row["number"]]
            return {"reward": one, "turn_rewards": [one]}

    trainer = played(tmp_path, Agent())
    assert [e.turn_rewards for e in trainer.episodes] == [[2.0]] * 4


def test_a_template_with_tool_calls_that_upstream_does_not_know_is_played_as_text(tmp_path):
    tokenizer = char_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "{{ m['content'] }}", "{{ m['content'] }}{{ m.tool_calls }}"
    )

    async def agent(client, row):
        answer = await ask(client, [*HI, said(await ask(client)), *HI])
        assert answer.choices[0].message.tool_calls is None
        return 1.0

    trainer = played(tmp_path, agent, arguments={"processing_class": tokenizer})
    assert [len(e.contexts) for e in trainer.episodes] == [1] * 4
    trainer.save_model(str(tmp_path / "saved"))
    policy = Agent.from_pretrained(str(tmp_path / "saved"), device="cpu")
    assert policy.run(None, {"question": "?"}, agent=agent).score == 1.0


def test_the_row_is_the_agents_own(tmp_path):
    async def agent(client, row):
        row["prompt"].append({"role": "user", "content": "more"})
        await ask(client, row["prompt"])
        return 1.0

    trainer = played(tmp_path, agent)
    assert [len(row["prompt"]) for row in trainer.rollouts[-1].rows] == [1] * 4


def schema(**changes):
    """The schema of a tool `f` with an argument `x`."""
    named = {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}
    return {"type": "function", "function": {"name": "f", "parameters": {**named, **changes}}}


SINGLE = [schema()]


@pytest.mark.parametrize(("turn", "tools", "valid"), [
    ("!f 1]", SINGLE, True),
    ("!f 1;f 2]", SINGLE, True),
    ("!f 1;g 2]", SINGLE, False),
    ("!f]", SINGLE, False),
    ("!f 1]", [schema(properties={"y": {}}, required=[])], False),
    ("!f 1]", [schema(properties={"y": {}}, required=[], additionalProperties=True)], True),
    ("!f 1]", [schema(properties={}, required=[])], True),
    ("!f 1]", [{"type": "function", "function": {"name": "f"}}], True),
    ("It is 5.]", SINGLE, True),
    ("It is 5.", SINGLE, False),
    ("It is Stop 5", SINGLE, True),
    ("<tool_call>f 1]", SINGLE, False),
    ("]", SINGLE, True),
    ("!f 1]", [], None),
])  # fmt: skip
def test_with_tools_a_turn_is_a_call_that_fits_or_an_answer(turn, tools, valid, monkeypatch):
    monkeypatch.setattr(RENDERER.tokenizer, "response_schema", {"type": "object"}, raising=False)

    async def agent(client, row):
        await ask(client, tools=tools, stop=["Stop"])
        await ask(client, tools=tools, stop=["Stop"], extra_body={"train": False})
        return 1.0

    limits = Limits(max_completion_tokens=200, max_turn_tokens=len(turn))
    driver = AgentDriver(agent, RENDERER, parse, limits)
    engine = RolloutEngine({None: driver}, EnvironmentPool({}), EnvironmentCalls(), limits)
    backend = ScriptedBackend(says([turn], [turn] * 2))
    (episode,), _ = engine.run([{}], [""], RENDERER, backend)
    engine.close()
    assert episode.valid_actions == ([] if valid is None else [valid])


def test_tool_calls_before_a_stop_string_are_calls():
    given = []

    async def agent(client, row):
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        answer = await ask(client, tools=[tool], stop=["Observation"])
        given.append(answer.choices[0])
        return 1.0

    limits = Limits(max_completion_tokens=200)
    driver = AgentDriver(agent, RENDERER, parse, limits)
    engine = RolloutEngine({None: driver}, EnvironmentPool({}), EnvironmentCalls(), limits)
    script = says(["!f 1Observation: 5]"], ["so Observation: 5]"])
    rows = [{}, {}]
    (first, _), _ = engine.run(rows, ["", ""], RENDERER, ScriptedBackend(script))
    engine.close()
    # Two agents run at once, so either answer may come first.
    given.sort(key=lambda choice: choice.finish_reason == "stop")
    calls = [[c.function.name for c in choice.message.tool_calls or []] for choice in given]
    assert calls == [["f"], []]
    assert [choice.finish_reason for choice in given] == ["tool_calls", "stop"]
    assert given[1].message.content == "so "
    assert RENDERER.decode_action(first.ids) == "!f 1Observation"
