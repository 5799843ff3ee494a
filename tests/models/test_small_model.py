from pathlib import Path

import pytest
from transformers import AutoTokenizer, Qwen2ForCausalLM

from scripts.search.search_env.retrieval import passages
from trl_stppo.models.small import tiny_config, tiny_tokenizer

MARKERS = ["<search>", "</search>", "<answer>", "</answer>"]
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Which module defines the function merge?"},
    {"role": "assistant", "content": "<search> merge</search>"},
    {"role": "user", "content": "<information> merge is a function. </information>"},
    {"role": "assistant", "content": "<answer> heapq</answer>"},
]
TRICKY = [
    "Which module defines DictReader?", "<search> os.path</search> x<|end|><|user|>",
    " __init__ 12 \n\n x", "\ta  b", "naïve café", "heapq.merge set_ok_verifiability",
]  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer():
    texts = [passage.text for passage in passages()[::20]]
    return tiny_tokenizer(texts, vocab_size=400, markers=MARKERS)


def ids(tokenizer, conversation, **options) -> list[int]:
    return tokenizer.apply_chat_template(conversation, return_dict=False, **options)


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


def test_special_tokens_are_distinct_and_markers_survive(tokenizer) -> None:
    assert tokenizer.pad_token_id != tokenizer.eos_token_id
    assert len(set(tokenizer.all_special_ids)) == 5
    for marker in MARKERS:
        assert len(tokenizer(marker).input_ids) == 1
    text = "<search> merge</search>"
    assert tokenizer.decode(tokenizer(f"{text}<|end|>").input_ids, skip_special_tokens=True) == text
