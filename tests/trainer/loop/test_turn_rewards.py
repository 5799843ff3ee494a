"""Process rewards through `trainer.train()`: what the functions are asked, and where it is paid."""

import asyncio
import logging

import pytest
from trl import GRPOTrainer

from tests.kit.builders import LIMITS, Kept, build, logs, prompts
from tests.kit.fakes import CountEnv, char_tokenizer
from tests.trainer.loop.test_rollouts_in_training import two_turns
from tests.trainer.loop.test_tool_environments import SCRIPTS, PayingEnv, tool_trainer
from trl_stppo.rollout.record import StopReason
from trl_stppo.trainer.loop.sampler import TurnSampler

TOKENIZER = char_tokenizer()
SIZES = {"gradient_accumulation_steps": 1, "num_mini_batches": 1, "max_steps": 1, "kl_coef": 0.0}


@pytest.fixture
def scripted(monkeypatch):
    """Turns are "aa0.", "aa1." and so on, each with the end-of-turn token."""

    def turn(self, prompt_ids, images, multimodal_fields, num_generations, **kwargs):
        texts = self._tokenizer.batch_decode(prompt_ids, skip_special_tokens=False)
        said = [f"aa{text.count('.')}.<|im_end|>" for text in texts]
        return [self._tokenizer(text)["input_ids"] for text in said], None

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", turn)
    monkeypatch.setattr(TurnSampler, "why_not_cached", lambda self: "A script answers.")


class Watch:
    """A turn reward function that keeps what it was asked; pays by `value(turn number)`."""

    __name__ = "watch"

    def __init__(self, value=float):
        self.value, self.calls = value, []

    def __call__(self, prompts, completions, completion_ids, turn, trainer_state, **kwargs):
        assert trainer_state.global_step >= 0
        kwargs["log_extra"]("watched", turn)
        own = ("log_metric", "log_extra", "environments")
        columns = {k: v for k, v in kwargs.items() if k not in own}
        self.calls.append((prompts, completions, completion_ids, turn, columns))
        return [self.value(number) for number in turn]


class Constant(CountEnv):
    """Two turns that the environment pays 0.25 each."""

    def step(self, action):
        _, _, done, truncated, info = super().step(action)
        return "more", 0.25, done, truncated, info


def trained(folder, funcs, *, environment=Constant, data=None, arguments=None, **options):
    arguments = {
        "train_dataset": prompts(4) if data is None else data,
        "turn_reward_funcs": funcs,
        **({} if environment is None else {"environment_factory": environment}),
        **(arguments or {}),
    }
    limits = {} if environment is None else LIMITS
    trainer = build(folder, Kept, arguments=arguments, **{**SIZES, **limits, **options})
    trainer.train()
    return trainer


def paid(trainer, rollout=0):
    """Per episode the rewards at the last tokens of its turns; nothing may be elsewhere."""
    _, _, turns, _, estimates = trainer.kept[rollout]
    table = []
    for index, rewards in zip(turns.turn_index, estimates.rewards, strict=True):
        last = [int((index == k).nonzero().max()) for k in range(int(index.max()) + 1)]
        rest = rewards.clone()
        rest[last] = 0.0
        assert not rest.any()
        table.append([round(rewards[at].item(), 4) for at in last])
    return table


def user(text):
    return {"role": "user", "content": text}


def said(text):
    return {"role": "assistant", "content": text}


def test_text_environments_give_the_conversation_before_each_turn(tmp_path, scripted):
    watch = Watch(lambda number: 1.0 + number)
    data = prompts(4, level=[5, 6, 7, 8], letter=["b"] * 4)
    trainer = trained(tmp_path, watch, data=data, shuffle_dataset=False)
    ((asked, completions, ids, turn, columns),) = watch.calls
    assert asked == [
        context
        for i in range(4)
        for context in ([user(f"say {i} b")], [user(f"say {i} b"), said("aa0."), user("more")])
    ]
    assert completions == [[said("aa0.")], [said("aa1.")]] * 4
    assert ids == [TOKENIZER(f"aa{k}.<|im_end|>")["input_ids"] for k in (0, 1)] * 4
    assert turn == [0, 1] * 4
    assert columns == {"level": [5, 5, 6, 6, 7, 7, 8, 8], "letter": ["b"] * 8}
    assert paid(trainer) == [[1.25, 2.25]] * 4
    assert logs(trainer)["rewards/watch/turn_mean"] == 1.5
    assert logs(trainer)["episode/score"] == 3.5


@pytest.mark.long
def test_tool_environments_give_calls_and_answers(tmp_path, monkeypatch):
    watch = Watch(lambda number: 100.0 * (number + 1))
    trainer = tool_trainer(tmp_path, monkeypatch, PayingEnv, shuffle_dataset=False)
    trainer._turn_reward_funcs.funcs = [watch]
    trainer.train()
    asked, completions, _, turn, _ = watch.calls[0]
    assert turn == [0, 1, 2, 0, 1, 2, 0, 1, 0]
    first = [m["role"] for m in asked[2]]
    assert first == ["user", "assistant", "tool", "tool", "assistant", "tool"]
    assert [m["content"] for m in asked[2] if m["role"] == "tool"] == ["ok"] * 3
    assert asked[4][-1]["content"] == str({"error": "broken"})
    calls = [c[0]["tool_calls"] for c in completions if c[0].get("tool_calls")]
    assert calls[0][1]["function"] == {"name": "pay", "arguments": {"amount": 2.0}}
    assert completions[2][0]["content"] == "done"
    for row, (_, earned) in zip(paid(trainer), SCRIPTS, strict=True):
        expected = [e + 100.0 * (k + 1) for k, e in enumerate(earned)]
        expected[-1] += PayingEnv.final
        assert row == expected


def test_a_rollout_func_gives_the_text_before_each_turn(tmp_path):
    watch = Watch(lambda number: 10.0)
    trainer = trained(
        tmp_path, watch, environment=None, arguments={"rollout_func": two_turns},
        shuffle_dataset=False,
    )  # fmt: skip
    ((asked, completions, ids, turn, columns),) = watch.calls
    text = TOKENIZER.decode([7, 8, 9])
    assert asked[:2] == [[user("say 0 ")], [user("say 0 "), said(text)]]
    assert completions[:2] == [[said(text[:2])], [said(TOKENIZER.decode([10, 11]))]]
    assert ids[:2] == [[7, 8], [10, 11]]
    assert turn == [0, 1] * 4
    assert columns["hint"] == [0, 0, 1, 1, 2, 2, 3, 3], "what the rollout adds to its rows"
    assert paid(trainer) == [[11.0, 12.0]] * 4


def test_rewards_of_several_functions_are_added(tmp_path, scripted):
    async def thoughtful(completions, **kwargs):
        await asyncio.sleep(0.01)
        return [4.0] * len(completions)

    class Later:
        """Is awaitable without being a coroutine."""

        def __await__(self):
            yield from asyncio.sleep(0).__await__()
            return [2.0] * 8

    def later(**kwargs):
        return Later()

    def sometimes(turn, **kwargs):
        return [None if number == 0 else -8.0 for number in turn]

    def never(turn, **kwargs):
        return [None] * len(turn)

    funcs = [Watch(lambda number: 1.0), thoughtful, later, sometimes, never]
    trainer = trained(tmp_path, funcs)
    assert paid(trainer) == [[0.25 + 1.0 + 4.0 + 2.0, 0.25 + 1.0 + 4.0 + 2.0 - 8.0]] * 4
    figures = logs(trainer)
    means = {k.split("/")[1]: v for k, v in figures.items() if k.endswith("/turn_mean")}
    assert means == {"watch": 1.0, "thoughtful": 4.0, "later": 2.0, "sometimes": -8.0}


class Fragile(Constant):
    """Fails in its second turn where the row says so."""

    def reset(self, fails: bool, **row):
        self.fails = fails
        return super().reset()

    def step(self, action):
        if self.fails and self.count == 1:
            raise RuntimeError("broken")
        return super().step(action)


def test_episodes_whose_environment_failed(tmp_path, scripted, caplog):
    watch = Watch(lambda number: 1.0)
    data = prompts(4, fails=[False, True, False, False])
    with caplog.at_level(logging.WARNING, "trl_stppo"):
        trainer = trained(tmp_path, watch, environment=Fragile, data=data, shuffle_dataset=False)
    fails = watch.calls[0][4]["fails"]
    _, batch, _, _, estimates = trainer.kept[0]
    assert trainer.episodes[1].stop_reason is StopReason.ENV_ERROR
    assert "1 of 4 episodes ended in a failure" in caplog.text
    assert fails.count(True) == 0
    assert not batch["loss_mask"][1].any()
    assert not estimates.advantages[1].any()
    assert paid(trainer)[0] == [1.25, 1.25]


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("value", "named", "asynchronous"), [
    (lambda n: [0.0] * (n - 1), "broken", False),
    (lambda n: [0.0] * (n - 1) + [NAN], "broken()[7]", True),
    (lambda n: [INF] + [0.0] * (n - 1), "broken()[0]", False),
])  # fmt: skip
def test_what_a_function_may_not_return_is_named(tmp_path, scripted, value, named, asynchronous):
    def broken(turn, **kwargs):
        return value(len(turn))

    async def broken_later(turn, **kwargs):
        return value(len(turn))

    broken_later.__name__ = "broken"
    with pytest.raises(ValueError) as caught:
        trained(tmp_path, [Watch(), broken_later if asynchronous else broken])
    assert f"`{named}`" in str(caught.value)
