"""The model of `make pretrained`: an answer, and turns through an agent and through `generate`."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.kit.script_kit import ROOT
from trl_stppo import Agent

FOLDER = ROOT / "runs" / "pretrained" / "smollm2-135m-instruct"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
pytestmark = [
    pytest.mark.pretrained,
    pytest.mark.skipif(not FOLDER.exists(), reason=f"{FOLDER} is made by `make pretrained`"),
]


class Germany:
    """Answers the first turn with a second question."""

    def reset(self, **row: object) -> tuple[str, dict]:
        self.turns = 0
        return "", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.turns += 1
        return "And of Germany?\n\n10 words at most.", 0.0, self.turns == 2, False, {}


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


def generated(model, tokenizer, messages: list[dict[str, str]]) -> list[int]:
    """The tokens of the likeliest answer."""
    options = {"return_tensors": "pt", "return_dict": True, "add_generation_prompt": True}
    prompt = tokenizer.apply_chat_template(messages, **options)
    output = model.generate(**prompt, do_sample=False, max_new_tokens=24)
    return output[0, prompt["input_ids"].shape[1] :].tolist()


def test_it_knows_the_capital_of_france(model, tokenizer):
    answer = generated(model, tokenizer, QUESTION)
    assert "Paris" in tokenizer.decode(answer)
    assert answer[-1] == tokenizer.eos_token_id
    assert (model.dtype, model.num_parameters()) == (torch.float32, 134_515_008)


def test_two_greedy_turns_of_an_agent_are_those_of_generate(model, tokenizer):
    agent = Agent.from_pretrained(str(FOLDER), max_turn_tokens=24)
    episode = agent.run(Germany, {"prompt": QUESTION})
    turns = [episode.ids[start:end] for start, end in episode.turn_spans]
    assert turns == [generated(model, tokenizer, episode.messages[:length]) for length in (1, 3)]
    assert [m["role"] for m in episode.messages] == ["user", "assistant"] * 2
    assert episode.stop_reason == "terminated"
