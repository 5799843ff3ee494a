"""A LLaVA of 200,000 parameters, made from nothing: an image of 24 x 24 pixels is nine tokens."""

from typing import Any

import torch
from tokenizers import AddedToken
from transformers import (
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    Qwen2Tokenizer,
)
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

SIDE, CELL = 24, 8
MARKS = ("<|pad|>", "<|end|>", "<|user|>", "<|assistant|>", "<image>")
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{{ '<image>' if c.type == 'image' else c.text }}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def vision_model(seed: int) -> tuple[LlavaForConditionalGeneration, Any]:
    """Return a random model and its processor, which needs Pillow alone."""
    torch.manual_seed(seed)
    letters = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    ends = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "unk_token": None}
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[], **ends)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.chat_template = TEMPLATE
    text = {
        "model_type": "qwen2", "vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "initializer_range": 0.08, "max_position_embeddings": 256,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    tower = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64,
        # LLaVA reads the states before the last layer: here the patches themselves.
        "num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 32,
        "image_size": SIDE, "patch_size": CELL,
    }  # fmt: skip
    config = LlavaConfig(
        text_config=text,
        vision_config=tower,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
    )
    processor = LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": SIDE}, crop_size=SIDE),
        tokenizer=tokenizer,
        patch_size=CELL,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=TEMPLATE,
    )
    return LlavaForConditionalGeneration(config), processor
