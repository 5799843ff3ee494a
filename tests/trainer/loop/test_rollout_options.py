"""Every option of the rollout through `trainer.train()`: what it changes, and only that."""

import itertools
import threading

import pytest
import torch
from trl import GRPOTrainer

from tests.kit.builders import LIMITS, Kept, build, logs, prompts
from tests.kit.fakes import CountEnv, char_tokenizer
from tests.kit.tool_model import TEMPLATE
from trl_stppo.generation.batched import BatchedBackend
from trl_stppo.generation.cached import CachedBackend

SIZES = {"gradient_accumulation_steps": 1, "num_mini_batches": 1, "max_steps": 1, "kl_coef": 0.0}


def built(folder, environment=CountEnv, data=None, arguments=None, **options):
    arguments = {
        "environment_factory": environment,
        "train_dataset": prompts(4) if data is None else data,
        **(arguments or {}),
    }
    options = {**SIZES, **LIMITS, "shuffle_dataset": False, **options}
    return build(folder, Kept, arguments=arguments, **options)


def trained(*args, **kwargs):
    trainer = built(*args, **kwargs)
    trainer.train()
    return trainer


def reasons(trainer):
    return [str(episode.stop_reason) for episode in trainer.episodes]


class Sleepy(CountEnv):
    """Sleeps as long as the row says in its second turn; counts who is awake at once."""

    lock, open, most_open = threading.Lock(), 0, 0
    forgotten = threading.Event()

    @classmethod
    def forget(cls):
        cls.forgotten.set()
        cls.forgotten = threading.Event()
        cls.open = cls.most_open = 0

    def reset(self, pause=0.0, **row):
        with self.lock:
            Sleepy.open += 1
            Sleepy.most_open = max(Sleepy.most_open, Sleepy.open)
        self.pause, self.born = pause, Sleepy.forgotten
        return super().reset()

    def step(self, action):
        self.born.wait(self.pause if self.count else 0.01)
        result = super().step(action)
        if self.born is Sleepy.forgotten:
            with self.lock:
                Sleepy.open -= result[2]
        return result


@pytest.mark.long
@pytest.mark.parametrize(("slots", "expected"), [(1, {1}), (2, {2}), (None, {2, 3, 4})])
def test_generation_slots(tmp_path, monkeypatch, slots, expected):
    """Never more episodes at once, neither on the model nor in their environments."""
    Sleepy.forget()
    held, original = [], CachedBackend.add

    def add(self, request):
        original(self, request)
        held.append(len(self._rows) * (type(self) is CachedBackend))

    monkeypatch.setattr(CachedBackend, "add", add)
    data = prompts(4, pause=[0.1] * 4)
    trainer = trained(tmp_path, Sleepy, data, generation_slots=slots)
    assert max(held) == (slots or 4)
    assert Sleepy.most_open in expected
    assert reasons(trainer) == ["terminated"] * 4


class Failing(CountEnv):
    """Pays 1 a turn; fails in its second turn, or at once, where the row says so."""

    def reset(self, fails=0, **row):
        self.fails = fails
        if fails == 1:
            raise RuntimeError("no start")
        return super().reset()

    def step(self, action):
        if self.fails == 2 and self.count == 1:
            raise RuntimeError("broken")
        _, _, *rest = super().step(action)
        return "more", 1.0, *rest


def test_an_episode_whose_environment_failed_is_counted_but_not_trained_on(tmp_path):
    trainer = trained(tmp_path, Failing, prompts(4, fails=[0, 2, 1, 0]))
    _, batch, *_ = trainer.kept[0]
    assert batch["loss_mask"].any(dim=1).tolist() == [True, False, False, True]
    figures = logs(trainer)
    # Two episodes score 2. One fails after a turn with reward 1, one before its first turn.
    assert figures["episode/score"] == pytest.approx((2 + 2 + 1 + 0) / 4)
    assert figures["stop_reason/env_error"] == 0.5


def test_reward_functions_are_not_asked_about_failed_episodes(tmp_path):
    asked = []

    def plain(prompts, completions, completion_ids, fails, **kwargs):
        assert len(prompts) == len(completions) == len(completion_ids) == len(fails)
        asked.append(fails)
        return [10.0 + i for i in range(len(fails))]

    async def awaited(completions, fails, **kwargs):
        asked.append(fails)
        return [100.0] * len(completions)

    data = prompts(4, fails=[0, 2, 1, 0])
    trainer = trained(tmp_path, Failing, data, {"reward_funcs": [plain, awaited]})
    assert asked == [[0, 0]] * 2
    assert trainer.kept[0][3].tolist() == [110.0, 0.0, 0.0, 111.0], "each row its own"
    assert logs(trainer)["rewards/plain/mean"] == 10.5


class Lookup:
    """A tool environment beside a text environment."""

    def reset(self, **row) -> str:
        return " Look it up."

    def look(self, word: str) -> str:
        """Look a word up.\n\nArgs:\n    word: the word."""
        return word

    def get_reward(self) -> float:
        return 7.0


def test_text_and_tool_environments_in_one_batch(tmp_path):
    from trl.chat_template_utils import qwen3_template

    tokenizer = char_tokenizer()
    tokenizer.chat_template, tokenizer.response_template = TEMPLATE, qwen3_template
    factories = {"count": lambda: CountEnv(2), "lookup": Lookup}
    data = prompts(4, environment=["count", "lookup"] * 2)
    arguments = {"processing_class": tokenizer}
    trainer = trained(tmp_path, factories, data, arguments, max_completion_length=200)
    assert reasons(trainer)[::2] == ["terminated"] * 2
    _, _, turns, scores, estimates = trainer.kept[0]
    assert (turns.turn_index.amax(1) + 1).tolist()[::2] == [2, 2]
    assert scores.tolist() == [0.0, 7.0, 0.0, 7.0]
    paid = turns.turn_rewards.sum(1)
    torch.testing.assert_close(estimates.rewards.sum(1), paid + scores)
    assert not paid[1::2].any()


def test_sampling_that_the_cache_does_not_know_goes_through_generate(tmp_path, monkeypatch):
    used = []
    original = BatchedBackend.step
    monkeypatch.setattr(
        BatchedBackend, "step", lambda self: (used.append(len(self._queue)), original(self))[1]
    )
    trainer = trained(tmp_path, generation_kwargs={"no_repeat_ngram_size": 2}, max_steps=2)
    assert "no_repeat_ngram_size" in trainer._player.sampler.why_not_cached()
    assert max(used) > 1
    for _, batch, turns, *_ in trainer.kept:
        assert "sampling_per_token_logps" not in batch
        for ids, index in zip(batch["completion_ids"], turns.turn_index, strict=True):
            for k in range(int(index.max()) + 1):
                said = ids[index == k].tolist()
                pairs = list(itertools.pairwise(said))
                assert len(set(pairs)) == len(pairs)
    assert trainer.generation_config.max_new_tokens == LIMITS["max_completion_length"]


@pytest.mark.long
def test_continuous_batching_plays_environments_and_leaves_the_model_as_it_was(tmp_path, monkeypatch):
    modes = []
    original = GRPOTrainer._generate_single_turn

    def watch(self, ids, *args, **kwargs):
        modes.append(self.model.training)
        return original(self, ids, *args, **kwargs)

    monkeypatch.setattr(GRPOTrainer, "_generate_single_turn", watch)
    trainer = built(
        tmp_path, use_transformers_continuous_batching=True,
        transformers_continuous_batching_config={"num_blocks": 16, "max_batch_tokens": 128},
        arguments={"eval_dataset": prompts(4)},
    )  # fmt: skip
    trainer.train()
    assert set(reasons(trainer)) <= {"terminated", "max_turns", "token_budget"}
    assert (trainer.kept[0][2].turn_index.amax(1) == 1).all()
    trainer.evaluate()
    assert trainer.model.training is True, "as the training has left it"
    assert modes == [True] * modes.count(True) + [False] * modes.count(False)
    assert set(modes) == {True, False}
