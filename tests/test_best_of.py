"""The script that plays the best of several turns, and its score of turns in training."""

import pytest
import torch
from peft import LoraConfig

from tests.hub.hub_kit import letters, run, saved_base
from tests.kit.fakes import CountEnv, char_tokenizer, tiny_policy
from tests.kit.script_kit import AGENT, DEMO, scripts
from trl_stppo import Agent
from trl_stppo.generation.protocol import TurnRequest, TurnResult
from trl_stppo.models.critic import SharedCritic

with scripts():
    import best_of
    from best_of import BestOf, critic_of, critic_scores, label_scores

ROWS = [dict(row) for row in letters()][:4]
TOKENIZER = char_tokenizer()
LORA = LoraConfig(task_type="CAUSAL_LM", r=2, target_modules="all-linear")
USER, SAID = {"role": "user", "content": "add"}, {"role": "assistant", "content": "look"}


class Later:
    """Answers the oldest requests first; a turn's token is the last part of its seed, plus one."""

    def __init__(self, capacity=None, per_step=100):
        self.capacity, self.per_step = capacity, per_step
        self.queue: dict[int, TurnRequest] = {}
        self.requests: list[TurnRequest] = []
        self.released: list[int] = []

    @property
    def busy(self):
        return bool(self.queue)

    def add(self, request):
        self.requests.append(request)
        self.queue[request.key] = request

    def step(self):
        now = [self.queue.pop(key) for key in list(self.queue)[: self.per_step]]
        return [TurnResult(r.key, [r.seed[-1] + 1], [-0.5]) for r in now]

    def release(self, key):
        self.queue.pop(key, None)
        self.released.append(key)


def highest(rows, turns):
    """Scores are largest at the row's first token."""
    return [-abs(ids[0] - row[0]) for row, ids in zip(rows, turns, strict=True)]


def test_the_best_is_played_and_the_others_are_released():
    inner = Later()
    backend = BestOf(inner, 3, highest)
    backend.add(TurnRequest(4, [2], 9, (7, 4)))
    assert backend.busy
    assert [(r.key, r.seed) for r in inner.requests] == [(12 + i, (7, 4, i)) for i in range(3)]
    assert {(tuple(r.ids), r.max_new_tokens) for r in inner.requests} == {((2,), 9)}
    assert backend.step() == [TurnResult(4, [2], [-0.5])]
    assert inner.released == [12, 14]
    backend.add(TurnRequest(4, [3], 9, (7, 5)))
    assert backend.step() == [TurnResult(4, [3], [-0.5])]
    backend.release(4)
    assert inner.released[-3:] == [12, 13, 14]


def test_an_episode_that_is_released_in_the_middle_starts_anew():
    backend = BestOf(Later(per_step=1), 2, highest)
    backend.add(TurnRequest(0, [1], 1, (0,)))
    assert backend.step() == []
    backend.release(0)
    assert not backend.busy
    backend.add(TurnRequest(0, [2], 1, (0,)))
    assert backend.step() == []
    assert backend.step() == [TurnResult(0, [2], [-0.5])]


@pytest.fixture(scope="module", params=["separate", "shared"])
def saved(request, tmp_path_factory):
    """An agent with a critic that has learnt something, and so differs from state to state."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    arguments = {}
    if request.param == "shared":
        base = saved_base(tmp_path_factory.mktemp("base"))
        arguments = {"peft_config": LORA, "model": base, "processing_class": char_tokenizer()}
    options = {"critic_learning_rate": 0.05, "max_steps": 4}
    trainer = run(folder, hub_model_id=None, arguments=arguments, **options)
    trainer.train()
    trainer.save_model(str(folder))
    return folder, trainer


@pytest.mark.long
def test_the_critic_scores_as_in_training(saved):
    folder, trainer = saved
    agent, seen = Agent.from_pretrained(str(folder)), []
    critic = critic_of(str(folder), agent.model)
    assert isinstance(critic, SharedCritic) == hasattr(trainer.model, "peft_config")
    scores = critic_scores(critic)

    def keep(rows, turns):
        values = scores(rows, turns)
        seen.extend(zip(rows, turns, values, strict=True))
        return values

    def play(parallel):
        options = {"wrap_backend": lambda backend: BestOf(backend, 3, keep), "parallel": parallel}
        return [e.ids for e in agent.run_many(CountEnv, ROWS, greedy=False, seed=2, **options)]

    assert play(4) == play(1), "whoever else plays"
    assert len({round(value, 6) for *_, value in seen}) > 4
    # Row by row, without padding, by the trainer's own critic.
    for before, ids, value in seen:
        row = torch.tensor([before + ids])
        with torch.no_grad(), trainer.critic.active():
            values = trainer.critic.values(row, torch.ones_like(row), len(ids))
        assert value == pytest.approx(values[0, max(1, len(ids) - 1)].item(), abs=1e-4)


def searches(prompts, completions):
    """Prefers searches to answers, in the alphabet's order."""
    assert all("<|im_start|>" not in prompt for prompt in prompts)
    return [-float(ord(turn.strip(" <")[:1] or "~")) for turn in completions]


@pytest.mark.long
def test_the_command(capsys, tmp_path):
    words = ["--config", DEMO, "--models", AGENT, "--max_rows", "4", "--output_dir", str(tmp_path)]
    results = best_of.main(["--candidates", "3", "--by", f"{__name__}:searches", *words])
    (figures,) = (part for parts in results.values() for part in parts.values())
    assert figures["episodes"] == 4


def share_of_yes(model, tokenizer, before, turn):
    """One row without padding, the two probabilities from the whole distribution."""
    question = best_of.TEMPLATE.format(before, turn)
    chat = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        chances = model(input_ids=ids).logits[0, -1].softmax(-1)
    yes, no = (chances[tokenizer.convert_tokens_to_ids(t)].item() for t in "yn")
    return yes / (yes + no)


def test_label_scores_are_the_share_of_yes():
    model = tiny_policy(TOKENIZER, seed=3).double().eval()
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    scored = label_scores(model, TOKENIZER)(
        [[USER], [USER, SAID, USER], "add "], [[SAID], [call], "go"], answers=["x"] * 3
    )
    expected = [
        ("user: add", "assistant: look"),
        ("user: add\nassistant: look\nuser: add", "assistant: [{'name': 'f'}]"),
        ("add ", "go"),
    ]
    wanted = [share_of_yes(model, TOKENIZER, *pair) for pair in expected]
    assert scored == pytest.approx(wanted, abs=1e-6)
    assert len({round(value, 6) for value in scored}) == 3
