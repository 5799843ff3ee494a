"""A causal model as a judge of turns."""

import math

import pytest
import torch

from tests.kit.fakes import char_tokenizer, tiny_policy
from trl_stppo.models.label_scorer import LabelTokenScorer

TOKENIZER = char_tokenizer()
SHORT = "{task}|{history}|{action}|{yes}{no}"
USER, AGENT = {"role": "user", "content": "add"}, {"role": "assistant", "content": "look"}
PROMPTS = [
    [USER],
    [USER, AGENT, {"role": "user", "content": "more"}],
    [{**USER, "content": "a" * 30}],
]
ACTIONS = [[{"role": "assistant", "content": text}] for text in ("go", "stay", "go on")]
ASKED = [
    "add|(nothing)|go|yesno",
    "add|assistant: look\nuser: more|stay|yesno",
    "a" * 30 + "|(nothing)|go on|yesno",
]


def judge(**options) -> LabelTokenScorer:
    model = tiny_policy(TOKENIZER, seed=3).double()
    return LabelTokenScorer(model, TOKENIZER, **{"template": SHORT, **options})


def expected(text: str, yes: str = "y", no: str = "n", model=None) -> float:
    """One row without padding, the two probabilities from the whole distribution."""
    model = model or tiny_policy(TOKENIZER, seed=3).double()
    ids = [TOKENIZER.convert_tokens_to_ids(t) for t in ["<|im_start|>", *"u ", *text, "<|im_end|>"]]
    ids += [TOKENIZER.convert_tokens_to_ids(t) for t in ["<|im_start|>", *"a "]]
    with torch.no_grad():
        probabilities = model(input_ids=torch.tensor([ids])).logits[0, -1].softmax(-1)
    first, second = (probabilities[TOKENIZER.convert_tokens_to_ids(t)].item() for t in (yes, no))
    return first / (first + second)


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_scores_are_the_share_of_yes(batch_size) -> None:
    scores = judge(batch_size=batch_size)(PROMPTS, ACTIONS, answers=["x"] * 3)
    assert scores == pytest.approx([expected(text) for text in ASKED], abs=1e-6)
    assert len({round(score, 6) for score in scores}) == 3


def test_other_labels_other_scores_that_add_up_to_one() -> None:
    swapped = judge(labels=("no", "yes"), template="{task}|{history}|{action}|yesno")(
        PROMPTS, ACTIONS
    )
    for one, other in zip(judge()(PROMPTS, ACTIONS), swapped, strict=True):
        assert one + other == pytest.approx(1.0)


def test_text_has_its_task_before_the_turn() -> None:
    assert judge()(["add "], ["go"]) == pytest.approx(
        [expected("add |(see above)|go|yesno")], abs=1e-6
    )


def test_a_long_history_loses_its_beginning() -> None:
    scores = judge(max_history=4)([PROMPTS[1]], [ACTIONS[1]])
    assert scores == pytest.approx([expected("add|more|stay|yesno")], abs=1e-6)


def test_tool_calls_are_shown() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}
    scores = judge()([[USER]], [[call]])
    assert scores == pytest.approx([expected("add|(nothing)|{'name': 'f'}|yesno")], abs=1e-6)


def test_without_a_chat_template_the_question_is_plain(monkeypatch) -> None:
    plain = char_tokenizer()
    plain.chat_template = None
    scorer = LabelTokenScorer(tiny_policy(TOKENIZER, seed=3).double(), plain, template=SHORT)
    ids = torch.tensor([[plain.convert_tokens_to_ids(t) for t in ASKED[0] + "\n"]])
    with torch.no_grad():
        logits = scorer.model(input_ids=ids).logits[0, -1]
    yes, no = (logits[plain.convert_tokens_to_ids(t)].item() for t in "yn")
    assert scorer([PROMPTS[0]], [ACTIONS[0]]) == pytest.approx(
        [1 / (1 + math.exp(no - yes))], abs=1e-6
    )


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`labels=\('yes', 'yep'\)`.*must differ"):
        judge(labels=("yes", "yep"))
    with pytest.raises(ValueError, match=r"`template` has the field 'tusk'; allowed are task"):
        judge(template="{tusk}")


def test_by_name_on_a_device(tmp_path) -> None:
    tiny_policy(TOKENIZER, seed=3).save_pretrained(tmp_path / "judge")
    loaded = LabelTokenScorer.from_pretrained(
        str(tmp_path / "judge"), tokenizer=TOKENIZER, device="cpu", template=SHORT
    )
    assert loaded.__name__ == "judge"
    assert loaded(PROMPTS, ACTIONS) == pytest.approx([expected(text) for text in ASKED], abs=1e-5)
    assert LabelTokenScorer.suits(str(tmp_path / "judge"))
