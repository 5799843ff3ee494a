"""Step rewards by the label of a vision model that sees the screenshot of the step."""

from pathlib import Path

import pytest
import torch

from tests.kit.vision import picture, vision_model
from tests.kit.vision_runs import trained, vision_trainer

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts" / "verifier"


@pytest.fixture
def judge(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    from seen_steps import seen_scores

    return seen_scores(*vision_model("LLaVA", seed=7))


def asked(*pictures):
    said = {"role": "assistant", "content": "left"}
    shown = [
        {"role": "user", "content": [{"type": "text", "text": "go"}, {"type": "image", "image": each}]}
        for each in pictures
    ]  # fmt: skip
    return [message for each in shown for message in (each, said)][:-1]


def test_a_step_is_scored_by_the_newest_screenshot(judge):
    from seen_steps import TEMPLATE

    step = [{"role": "assistant", "content": "right"}]
    prompts = [asked(*map(picture, seen)) for seen in ((1, 2), (3, 2), (2, 1))]
    one, same, other = judge(prompts, [step] * 3)
    assert one == same != other
    model, processor = vision_model("LLaVA", seed=7)
    text = f"<|im_start|>user\n<image>{TEMPLATE.format('go', 'right', 'yes', 'no')}<|im_end|>\n"
    text += "<|im_start|>assistant\n"
    inputs = processor(images=[picture(2)], text=[text], return_tensors="pt")
    with torch.no_grad():
        logits = model(**inputs).logits[0, -1]
    yes, no = (processor.tokenizer.encode(word)[0] for word in ("yes", "no"))
    assert one == pytest.approx(float(logits[[yes, no]].softmax(-1)[0]), abs=1e-6)
    # A step of text alone is scored too.
    assert 0 < judge([[{"role": "user", "content": "go"}]], [step])[0] < 1


@pytest.mark.long
def test_a_training_takes_the_scores_as_rewards_of_turns(judge, tmp_path):
    options = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    trainer = trained(vision_trainer(tmp_path, "LLaVA", turn_reward_funcs=[judge], **options))
    mean = trainer.state.log_history[0]["rewards/scores/turn_mean"]
    assert 0 < mean < 1
    assert max(float(move.abs().max()) for move in trainer.moved.values()) > 0
