"""Small stand-ins: a byte-like tokenizer with a chat template, tiny models, scripted environments."""

import random
import string

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2ForSequenceClassification,
)

SPECIAL = ["<pad>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }} {{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a {% endif %}"
)


def char_tokenizer() -> PreTrainedTokenizerFast:
    """One token per printable character, chat markers as specials; decode(encode(x)) == x."""
    alphabet = string.ascii_letters + string.digits + string.punctuation + " \n"
    vocab = {t: i for i, t in enumerate([*SPECIAL, *alphabet])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"], clean_up_tokenization_spaces=False,
    )  # fmt: skip
    core_decoder = __import__("tokenizers").decoders.Fuse()
    tokenizer.backend_tokenizer.decoder = core_decoder
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.padding_side = "left"
    return tokenizer


def tiny_config(tokenizer: PreTrainedTokenizerFast, **changes: object) -> Qwen2Config:
    """Two layers of sixteen."""
    settings = {
        "vocab_size": len(tokenizer), "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
        "max_position_embeddings": 512, "tie_word_embeddings": False,
        "pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
    }  # fmt: skip
    return Qwen2Config(**{**settings, **changes})


def tiny_policy(tokenizer: PreTrainedTokenizerFast, seed: int = 0, dtype=torch.float32):
    """A random causal model."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(tiny_config(tokenizer)).to(dtype)


def tiny_value_model(tokenizer: PreTrainedTokenizerFast, seed: int = 1, dtype=torch.float32):
    """A random sequence-classification model with one output."""
    torch.manual_seed(seed)
    return Qwen2ForSequenceClassification(tiny_config(tokenizer, num_labels=1)).to(dtype)


def float64_policy(tokenizer: PreTrainedTokenizerFast, seed: int = 0) -> GPT2LMHeadModel:
    """A random causal model that is float64 throughout; Qwen2's norms round to float32 inside."""
    torch.manual_seed(seed)
    return GPT2LMHeadModel(_float64_config(tokenizer)).double()


def float64_value_model(tokenizer: PreTrainedTokenizerFast, seed: int = 1) -> GPT2ForSequenceClassification:
    """The sequence-classification model to go with it."""
    torch.manual_seed(seed)
    return GPT2ForSequenceClassification(_float64_config(tokenizer, num_labels=1)).double()


def _float64_config(tokenizer: PreTrainedTokenizerFast, **changes: object) -> GPT2Config:
    return GPT2Config(
        vocab_size=len(tokenizer), n_positions=64, n_embd=16, n_layer=2, n_head=2,
        initializer_range=0.1, tie_word_embeddings=False, pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, **changes,
    )  # fmt: skip


class CountEnv:
    """Pays for how often a letter occurs in the action; ends after `turns` turns."""

    def __init__(self, turns: int = 2) -> None:
        self.turns = turns
        self._random = random.Random(0)

    def reset(self, letter: str = "a", **row: object) -> tuple[str, dict]:
        self.letter, self.count = letter, 0
        return f"{letter}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        self.count += 1
        reward = action.count(self.letter) / max(1, len(action))
        done = self.count >= self.turns
        info = {"valid_action": self.letter in action}
        if done:
            info["success"] = reward > 0.2
        return "more", reward, done, False, info
