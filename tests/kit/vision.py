"""Vision models of seven families, small and random, with processors made from nothing but Pillow."""

import random
from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from PIL import Image
from tokenizers import AddedToken
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.utils import PushToHubMixin

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}"
    "{% if c.type == 'image' %}IMAGE{% elif c.type == 'text' %}{{ c.text }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKS = ("<|endoftext|>", "<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_call>")
SPLIT = ("<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
TILES = tuple(f"<row_{row + 1}_col_{col + 1}>" for row in range(6) for col in range(6))
TEXT = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 2048,
}  # fmt: skip
TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


class NoVideo(PushToHubMixin):
    """Stands for the video processor, which needs torchvision; saved as an empty entry."""

    model_input_names = ()
    temporal_patch_size, merge_size, num_frames, fps = 2, 2, 1, 1
    _auto_class = None

    def to_dict(self) -> dict[str, Any]:
        return {}


def without_video(processor_class: type, **parts: Any) -> Any:
    """Make a processor without its part for videos."""
    accepts = {"check_argument_for_proper_class": lambda self, name, part: type(part)}
    kind = type(processor_class.__name__, (processor_class,), accepts)
    return kind(video_processor=NoVideo(), **parts)


def tokenizer(*images: str, template: str) -> Any:
    """A byte tokenizer with the marks of ChatML and of images."""
    vocab = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    ends = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "unk_token": None}
    made = hf.Qwen2Tokenizer(vocab=vocab, merges=[], **ends)
    made.add_tokens([AddedToken(t, special=True, normalized=False) for t in (*MARKS, *images)])
    made.chat_template = CHATML.replace("IMAGE", template)
    return made


def text_of(tok: Any, **options: Any) -> dict[str, Any]:
    """The settings of a text model."""
    ends = {"pad_token_id": tok.pad_token_id, "eos_token_id": tok.eos_token_id}
    return {**TEXT, "vocab_size": len(tok), **ends, **options}


def qwen(kind: str) -> tuple[Any, Any]:
    """Qwen2-VL, Qwen2.5-VL, Qwen3-VL or Qwen3.5: positions in three axes."""
    marks = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
    tok = tokenizer(*marks, template="<|vision_start|><|image_pad|><|vision_end|>")
    names = ("image_token_id", "vision_start_token_id", "vision_end_token_id", "video_token_id")
    ids = dict(zip(names, tok.convert_tokens_to_ids(list(marks)), strict=True))
    patches = {"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
    tower = {"depth": 2, "num_heads": 2, "initializer_range": 0.3, **patches}
    names = {"2": "Qwen2VL", "2.5": "Qwen2_5_VL", "3": "Qwen3VL"}
    name = {**names, "3.5": "Qwen3_5", "3.5 MoE": "Qwen3_5Moe"}[kind]
    if kind[0] == "3":
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
        tower |= {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}
        tower |= {"num_position_embeddings": 64}
        tower |= {"deepstack_visual_indexes": [0, 1]} if kind == "3" else {}
    elif kind == "2.5":
        tower |= {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}
        tower |= {"window_size": 16, "fullatt_block_indexes": [1]}
    else:
        tower |= {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}
    text = text_of(tok, rope_parameters=rope, **({"head_dim": 8} if kind[0] == "3" else {}))
    if kind.startswith("3.5"):
        # A layer with a recurrent state, and one with attention.
        rope["partial_rotary_factor"] = 1.0
        text |= {"layer_types": ["linear_attention", "full_attention"]}
        text |= {f"linear_{side}_head_dim": 8 for side in ("key", "value")}
        text |= {f"linear_num_{side}_heads": 2 for side in ("key", "value")}
        text |= {"num_experts": 4, "num_experts_per_tok": 2} if kind != "3.5" else {}
        text |= {f"{part}_intermediate_size": 32 for part in ("moe", "shared_expert")}
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=tower, **ids)
    config.tie_word_embeddings = False
    model = getattr(hf, f"{name}ForConditionalGeneration")(config)
    size = {"shortest_edge": 8 * 8, "longest_edge": 64 * 64}
    eye = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2, size=size)
    parts = {"image_processor": eye, "tokenizer": tok, "chat_template": tok.chat_template}
    return model, without_video(getattr(hf, f"{names.get(kind, 'Qwen3VL')}Processor"), **parts)


def idefics(name: str, *, splits: bool = False) -> tuple[Any, Any]:
    """SmolVLM or Idefics3: tensors [1, tiles, ...], separators among the image tokens."""
    tok = tokenizer("<image>", *SPLIT, *TILES, template="<image>")
    text = text_of(tok, model_type="llama", vocab_size=len(tok) + 8)
    tower = {**TOWER, "image_size": 32, "patch_size": 8, "initializer_range": 0.3}
    image = {"image_token_id": tok.convert_tokens_to_ids("<image>"), "scale_factor": 2}
    config = getattr(hf, f"{name}Config")(text_config=text, vision_config=tower, **image)
    config.tie_word_embeddings = False
    model = getattr(hf, f"{name}ForConditionalGeneration")(config)
    eyes = {"SmolVLM": SmolVLMImageProcessorPil, "Idefics3": Idefics3ImageProcessorPil}
    sizes = {"size": {"longest_edge": 64 if splits else 32}, "max_image_size": {"longest_edge": 32}}
    eye = eyes[name](do_image_splitting=splits, **sizes)
    parts = {"image_processor": eye, "tokenizer": tok, "chat_template": tok.chat_template}
    if name == "Idefics3":
        return model, hf.Idefics3Processor(image_seq_len=4, **parts)
    # It spells numbers in prompts about videos.
    processing_smolvlm.num2words = processing_smolvlm.num2words or str
    return model, without_video(hf.SmolVLMProcessor, image_seq_len=4, **parts)


def llava(*, splits: bool = False) -> tuple[Any, Any]:
    """LLaVA: one tensor [1, 3, h, w] per image; LLaVA-NeXT splits it into tiles."""
    tok = tokenizer("<image>", template="<image>")
    tower = {**TOWER, "model_type": "clip_vision_model", "image_size": 16, "patch_size": 4}
    name, grid = ("LlavaNext", [[16, 32], [32, 16]]) if splits else ("Llava", None)
    config = getattr(hf, f"{name}Config")(
        text_config=text_of(tok, model_type="qwen2"),
        vision_config={**tower, "projection_dim": 16},
        image_token_index=tok.convert_tokens_to_ids("<image>"),
        **({"image_grid_pinpoints": grid} if splits else {}),
    )
    config.tie_word_embeddings = False
    sizes = {"size": {"shortest_edge": 16}, "crop_size": 16}
    eye = CLIPImageProcessorPil(**sizes)
    if splits:
        eye = LlavaNextImageProcessorPil(image_grid_pinpoints=grid, **sizes)
    parts = {"image_processor": eye, "tokenizer": tok, "chat_template": tok.chat_template}
    features = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    made = getattr(hf, f"{name}Processor")(patch_size=4, **features, **parts)
    return getattr(hf, f"{name}ForConditionalGeneration")(config), made


def internvl() -> tuple[Any, Any]:
    """InternVL: tensors [tiles, 3, h, w]; the tokens around an image come with it."""
    tok = tokenizer("<IMG_CONTEXT>", "<img>", "</img>", "<video>", template="<IMG_CONTEXT>")
    for name, token in {
        "start_image_token": "<img>", "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>", "video_token": "<video>",
    }.items():  # fmt: skip
        setattr(tok, name, token)
        setattr(tok, f"{name}_id", tok.convert_tokens_to_ids(token))
    config = hf.InternVLConfig(
        text_config=text_of(tok, model_type="qwen2"),
        vision_config={**TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        image_token_id=tok.context_image_token_id,
        downsample_ratio=0.5,
    )
    config.tie_word_embeddings = False
    eye = GotOcr2ImageProcessorPil(size={"height": 16, "width": 16}, crop_to_patches=False)
    parts = {"image_processor": eye, "tokenizer": tok, "chat_template": tok.chat_template}
    made = without_video(hf.InternVLProcessor, image_seq_length=4, **parts)
    return hf.InternVLForConditionalGeneration(config), made


def gemma3() -> tuple[Any, Any]:
    """Gemma 3: the tokens of an image attend to each other, so its turns go through `generate`."""
    marks = ("<image_soft_token>", "<start_of_image>", "<end_of_image>")
    tok = tokenizer(*marks, template="<start_of_image>")
    for name, token in zip(("image_token", "boi_token", "eoi_token"), marks, strict=True):
        setattr(tok, name, token)
        setattr(tok, f"{name}_id", tok.convert_tokens_to_ids(token))
    config = hf.Gemma3Config(
        text_config=text_of(tok, head_dim=8, sliding_window=512),
        vision_config={**TOWER, "image_size": 16, "patch_size": 4, "vision_use_head": False},
        image_token_index=tok.image_token_id,
        boi_token_index=tok.boi_token_id,
        eoi_token_index=tok.eoi_token_id,
        mm_tokens_per_image=4,
    )
    config.tie_word_embeddings = False
    eye = Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, do_pan_and_scan=False)
    parts = {"image_processor": eye, "tokenizer": tok, "chat_template": tok.chat_template}
    made = hf.Gemma3Processor(image_seq_length=4, **parts)
    return hf.Gemma3ForConditionalGeneration(config), made


def gemma4() -> tuple[Any, Any]:
    """Gemma 4: patches with positions, layers of two widths; the tokens of an image attend to each other."""
    marks = {
        "image_token": "<|image|>", "boi_token": "<|image>", "eoi_token": "<image|>",
        "audio_token": "<|audio|>", "boa_token": "<|audio>", "eoa_token": "<audio|>",
    }  # fmt: skip
    tok = tokenizer(*marks.values(), template="<|image|>")
    for name, token in marks.items():
        setattr(tok, name, token)
        setattr(tok, f"{name}_id", tok.convert_tokens_to_ids(token))
    eye = Gemma4ImageProcessorPil(patch_size=4, pooling_kernel_size=2, max_soft_tokens=70)
    parts = {"image_processor": eye, "tokenizer": tok, "chat_template": tok.chat_template}
    made = without_video(hf.Gemma4Processor, feature_extractor=NoVideo(), **parts)
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 512}
    widths = {"head_dim": 8, "global_head_dim": 16, "num_global_key_value_heads": 1}
    widths |= {"hidden_size_per_layer_input": 0, "use_bidirectional_attention": "vision"}
    vision = {**TOWER, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    vision |= {"patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64}
    config = hf.Gemma4Config(
        text_config=text_of(tok, tie_word_embeddings=False, **kinds, **widths),
        vision_config=vision,
        audio_config=None,
        tie_word_embeddings=False,
        **{f"{name}_id": getattr(tok, f"{name}_id") for name in marks if name != "eoa_token"},
    )
    return hf.Gemma4ForConditionalGeneration(config), made


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "Qwen2-VL": lambda: qwen("2"),
    "Qwen2.5-VL": lambda: qwen("2.5"),
    "Qwen3-VL": lambda: qwen("3"),
    "SmolVLM": lambda: idefics("SmolVLM"),
    "SmolVLM in tiles": lambda: idefics("SmolVLM", splits=True),
    "Idefics3": lambda: idefics("Idefics3"),
    "LLaVA": llava,
    "LLaVA-NeXT": lambda: llava(splits=True),
    "InternVL": internvl,
}
UNCACHED = {
    "Gemma 3": gemma3, "Gemma 4": gemma4, "Qwen3.5": lambda: qwen("3.5"),
    "Qwen3.5 MoE": lambda: qwen("3.5 MoE"),
}  # fmt: skip


def vision_model(family: str, seed: int = 0) -> tuple[Any, Any]:
    """A random model of a family, and its processor."""
    torch.manual_seed(seed)
    model, processor = (FAMILIES | UNCACHED)[family]()
    return model.eval(), processor


def picture(seed: int, width: int = 16, height: int = 16) -> Image.Image:
    """An image of noise."""
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(3 * width * height))
