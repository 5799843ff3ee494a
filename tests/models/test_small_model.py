from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from trl_stppo.models.small import tiny_config, tiny_tokenizer
from trl_stppo.recipes.search.retrieval import passages, questions

CHECKPOINT = Path(__file__).parents[2] / "scripts" / "assets" / "search-agent"
MARKERS = ["<search>", "</search>", "<answer>", "</answer>"]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which module defines the function merge?"},
    {"role": "assistant", "content": "<search> merge</search>"},
    {"role": "user", "content": "<information> merge is a function. </information>"},
    {"role": "assistant", "content": "<answer> heapq</answer>"},
]
FROZEN_IDS = [
    3, 344, 275, 334, 296, 337, 264, 270, 75, 73, 35, 0, 4, 1024, 264, 270, 75, 73, 1025, 0,
]  # fmt: skip
TRICKY = [
    "Which module defines DictReader?", "<search> os.path</search> x<|end|><|user|>",
    " __init__ 12 \n\n x", "\ta  b", "naïve café", "heapq.merge set_ok_verifiability",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    texts = [passage.text for passage in passages()[::20]]
    return tiny_tokenizer(texts, vocab_size=400, markers=MARKERS)


@pytest.fixture(scope="module")
def shipped():
    return AutoTokenizer.from_pretrained(CHECKPOINT)


def ids(tokenizer, conversation, **options) -> list[int]:
    return tokenizer.apply_chat_template(conversation, return_dict=False, **options)


def assert_prefix_preserving(tokenizer) -> None:
    for end in range(1, len(CONVERSATION)):
        if CONVERSATION[end]["role"] == "assistant":
            shorter = ids(tokenizer, CONVERSATION[:end], add_generation_prompt=True)
        else:
            shorter = ids(tokenizer, CONVERSATION[:end])
        longer = ids(tokenizer, CONVERSATION[: end + 1])
        assert longer[: len(shorter)] == shorter
        assert len(longer) > len(shorter)


def test_reloaded_tokenizer_gives_the_same_ids(tokenizer, tmp_path: Path) -> None:
    tokenizer.save_pretrained(tmp_path)
    Qwen2ForCausalLM(tiny_config(tokenizer)).save_pretrained(tmp_path)
    reloaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TRICKY, *(passage.text for passage in passages()[1::50])]:
        assert reloaded(text).input_ids == tokenizer(text).input_ids
        assert reloaded.decode(reloaded(text).input_ids) == text
    assert ids(reloaded, CONVERSATION) == ids(tokenizer, CONVERSATION)
    assert reloaded.pad_token_id == tokenizer.pad_token_id
    assert reloaded.padding_side == "left"


def test_reloaded_model_gives_the_same_logits(tokenizer, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(tiny_config(tokenizer)).eval()
    model.save_pretrained(tmp_path)
    reloaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.tensor([ids(tokenizer, CONVERSATION)])
    assert reloaded.dtype == torch.float32
    assert torch.equal(reloaded(tokens).logits, model(tokens).logits)


def test_special_tokens_are_distinct_and_markers_survive(tokenizer) -> None:
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(set(tokenizer.all_special_ids)) == 5
    for marker in MARKERS:
        assert len(tokenizer(marker).input_ids) == 1
    text = "<search> merge</search>"
    assert tokenizer.decode(tokenizer(f"{text}<|end|>").input_ids, skip_special_tokens=True) == text


def test_template_only_ever_appends(tokenizer) -> None:
    assert_prefix_preserving(tokenizer)


def test_template_marks_what_the_model_says(tokenizer) -> None:
    encoded = tokenizer.apply_chat_template(
        CONVERSATION, return_dict=True, return_assistant_tokens_mask=True
    )
    said = [t for t, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(said) == (
        "<search> merge</search><|end|><answer> heapq</answer><|end|>"
    )


def test_checkpoint_is_small_and_loads() -> None:
    assert sum(path.stat().st_size for path in CHECKPOINT.rglob("*")) < 3_000_000
    assert (CHECKPOINT / "model.safetensors").is_file()
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    assert 400_000 < model.num_parameters() < 600_000
    assert model.config.tie_word_embeddings


def test_checkpoint_tokenizer_round_trips_and_appends(shipped) -> None:
    for text in [*TRICKY, *(row["prompt"][0]["content"] for row in questions("test")[:50])]:
        assert shipped.decode(shipped(text).input_ids) == text
    assert_prefix_preserving(shipped)
    assert shipped.pad_token_id != shipped.eos_token_id
    # Frozen: other ids would make the weights beside it meaningless.
    assert ids(shipped, CONVERSATION[1:3]) == FROZEN_IDS


def test_checkpoint_knows_the_protocol(shipped) -> None:
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT)
    prompt = ids(shipped, CONVERSATION[1:2], add_generation_prompt=True)
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[0, -1].softmax(-1)
    assert 0.3 < first[shipped.convert_tokens_to_ids("<search>")].item() < 0.95
