"""Reads many screenshots in one rollout, passes over them, and measures the memory of the process.

    python benchmarks/screenshots.py          # 960 of 1080 x 2400 pixels, some minutes
    python benchmarks/screenshots.py --quick  # under a minute, to see that it runs

A processor of Qwen2-VL's kind makes a screenshot's tensors. They are kept up to `KEPT_BYTES`; those of
older screenshots are made again in the pass. Threads read at once, as environments do. The last line is JSON.
"""

from __future__ import annotations

import argparse
import random
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from _outcome import finish, show
from PIL import Image, ImageDraw
from tokenizers import AddedToken
from transformers import Qwen2Tokenizer, Qwen2VLProcessor
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trl_stppo.rollout import images

SIZE = (1080, 2400)
MARKS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
GIB = 2**30


class NoVideo:
    """Stands for the video processor, which needs torchvision."""

    model_input_names = ()


class ImageProcessor(Qwen2VLProcessor):
    """A processor without its part for videos."""

    def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
        """Accept `NoVideo`."""
        return type(argument)


def reader() -> images.ImageReader:
    """Make a reader of screenshots for a model in bfloat16."""
    letters = {letter: number for number, letter in enumerate(bytes_to_unicode().values())}
    tokenizer = Qwen2Tokenizer(vocab=letters, merges=[], unk_token=None)
    tokenizer.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    processor = ImageProcessor(Qwen2VLImageProcessorPil(), tokenizer, NoVideo())
    token = tokenizer.convert_tokens_to_ids(MARKS[0])
    return images.ImageReader(processor, token, torch.bfloat16)


def screenshot(number: int) -> Image.Image:
    """Draw a screen with text, buttons and a photograph of noise."""
    lot, screen = random.Random(number), Image.new("RGB", SIZE, "white")
    draw = ImageDraw.Draw(screen)
    for row in range(60):
        x, y = lot.randrange(0, 600), 40 * row
        draw.rectangle((x, y, x + 400, y + 30), fill=lot.choice(("red", "grey", "navy", "gold")))
        draw.text((x + 10, y + 8), f"{lot.random()} {number}", fill="black")
    noise = Image.frombytes("RGB", (90, 90), lot.randbytes(3 * 90 * 90)).resize((360, 360))
    screen.paste(noise, (600, 400))
    return screen


def peak() -> int:
    """Return the largest memory of the process so far, in bytes."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    """Read, pass once over all, forget, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="24 screenshots, 128 MiB of tensors")
    parser.add_argument("--screenshots", type=int, default=960)
    parser.add_argument("--threads", type=int, default=8)
    args = parser.parse_args()
    count = 24 if args.quick else args.screenshots
    if args.quick:
        images.KEPT_BYTES = 128 * 2**20
    made, before = reader(), peak()
    began = time.perf_counter()
    with ThreadPoolExecutor(args.threads) as threads:
        read = [*threads.map(lambda number: made.read(screenshot(number)), range(count))]
    reading = time.perf_counter() - began
    made.train_on(read)
    began, size = time.perf_counter(), 0
    for image in read:
        size += sum(tensor.nbytes for tensor in made.joined([image], torch.device("cpu")).values())
    passing = time.perf_counter() - began
    figures = {
        "screenshots": count,
        "tokens": read[0].tokens,
        "tensors_gib": round(size / GIB, 2),
        "files_gib": round(sum(len(image.png) for image in read) / GIB, 3),
        "kept_bound_gib": images.KEPT_BYTES / GIB,
        "peak_gib": round(peak() / GIB, 2),
        "before_gib": round(before / GIB, 2),
        "read_s": round(reading, 1),
        "pass_s": round(passing, 1),
    }
    show("screenshots of one rollout", ["", "value"], [[k, str(v)] for k, v in figures.items()])
    finish(figures)


if __name__ == "__main__":
    main()
