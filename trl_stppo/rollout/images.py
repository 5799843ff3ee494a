"""Images in rows of tokens: read once, tokenised once, and known by their content afterwards.

No other file uses a multimodal processor. A chat template writes one placeholder per image. `ImageReader`
replaces it by the image's own tokens, and gives the image's tensors to each forward pass.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import io
import random
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Content = str | list[dict[str, Any]]

# Largest number of bytes of tensors that a process keeps. Older images make theirs at each use.
KEPT_BYTES = 4 * 2**30
# Largest number of pixels of an image; Pillow warns of larger images.
MOST_PIXELS = 50_000_000
# Tensors of an image that models take. A family with other tensors needs a rule to join them.
FIELDS = {
    *("pixel_values", "image_grid_thw", "pixel_attention_mask", "image_position_ids"),
    "image_sizes",
}
# Other values that processors return.
OTHERS = {
    *("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"),
    "num_soft_tokens_per_image",
}
# Longest side of a thumbnail, in pixels.
THUMBNAIL_SIDE = 320
# Bits of an image token's key that hold its place in the image.
PLACE_BITS = 20
# Width and height of the images of probes, in pixels.
SAMPLE_SIDES = (48, 32)
TEXTS_ONLY = "the policy reads only text: pass its processor as `processing_class`"


@dataclass(frozen=True)
class Image:
    """One image of a row.

    Attributes:
        key: number of 62 bits, a hash of size and pixels. Equal images have equal keys.
        size: width and height, in pixels.
        png: the image as a file.
        ids: tokens that replace the template's placeholder.
        tokens: number of image tokens in `ids`; the others are separators.
        grid: numbers of patches in time, height and width, if the model's positions depend on them.
    """

    key: int
    size: tuple[int, int] = field(compare=False)
    png: bytes = field(repr=False, compare=False)
    ids: tuple[int, ...] = field(repr=False, compare=False)
    tokens: int = field(compare=False)
    grid: tuple[int, ...] = field(default=(), repr=False, compare=False)

    def __str__(self) -> str:
        return f"[image {self.size[0]}x{self.size[1]}, {self.tokens} tokens]"

    def open(self) -> Any:
        """Return the image for Pillow, which decodes it at its first use."""
        from PIL import Image as Pillow

        return Pillow.open(io.BytesIO(self.png))

    def thumbnail(self) -> str:
        """Return a small JPEG of the image as a `data:` URL."""
        small, file = self.open(), io.BytesIO()
        small.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE))
        small.save(file, "JPEG")
        return f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}"


class ImageReader:
    """Reads images with a multimodal processor; thread-safe.

    Attributes:
        image_id: id of an image token.
        rope_index: the model's function for positions in several axes; None if positions are plain.
        kinds: the model's argument that marks image tokens, or None.
    """

    def __init__(
        self, processor: Any, image_id: int, dtype: Any, rope_index: Any = None, kinds: Any = None
    ) -> None:
        # Copy the processor, because environments' threads read images while another thread tokenises.
        self.processor, self.image_id = copy.deepcopy(processor), image_id
        self.rope_index, self.kinds = rope_index, kinds
        # The template of Gemma writes another token than the model reads.
        self.written = str(processor.image_token)
        self.written_id = processor.tokenizer.convert_tokens_to_ids(self.written)
        # Probes do not use these tokens, because some of them announce inputs that a probe lacks.
        self.marks = {*processor.tokenizer.added_tokens_decoder, self.written_id, self.image_id}
        self._dtype, self._bytes = dtype, 0
        # Use two locks, so that a look at the tables does not wait for the processor.
        self._processing, self._lock = threading.Lock(), threading.Lock()
        self._known: WeakValueDictionary[int, Image] = WeakValueDictionary()
        self._fields: dict[int, dict[str, Tensor]] = {}
        self._trained: set[Image] = set()

    def read(self, picture: Any) -> Image:
        """Return an image of Pillow as an `Image`; equal images give the same object."""
        if isinstance(picture, Image):
            return picture
        picture = _pixels(picture)
        digest = hashlib.sha256(repr(picture.size).encode() + picture.tobytes()).digest()
        key = int.from_bytes(digest[:8], "big") >> 2
        if (known := self._known.get(key)) is not None:
            return known
        file = io.BytesIO()
        picture.save(file, "PNG", compress_level=1)
        with self._processing:
            # Another thread may have read an equal image in the meantime.
            if (known := self._known.get(key)) is None:
                ids, fields = self._processed(picture)
                grid = fields.get("image_grid_thw")
                size = () if grid is None else tuple(grid[0].tolist())
                known = Image(key, picture.size, file.getvalue(), tuple(ids), ids.count(self.image_id), size)
                self._known[key] = known
                self._keep(key, fields, newest=True)
        return known

    def read_content(self, content: Any) -> Any:
        """Return a message's content with each image read."""
        if not isinstance(content, list):
            return content
        return [{**b, "image": self.read(b.get("image"))} if is_image(b) else b for b in content]

    def _processed(self, picture: Any) -> tuple[list[int], dict[str, Tensor]]:
        """Return the tokens and tensors that the processor makes of an image."""
        import torch

        made = self.processor(
            images=[picture], text=[self.written], return_tensors="pt", add_special_tokens=False
        )
        ids = [int(token) for token in made["input_ids"][0]]
        names = [name for name in made if name not in OTHERS]
        if others := {*names} - FIELDS:
            kind = type(self.processor).__name__
            raise ValueError(f"`processing_class` is a {kind}, whose {sorted(others)} are unknown.")
        tensors = {name: torch.as_tensor(made[name]) for name in names}
        # The model casts pixels to the dtype of its vision tower in any case.
        tensors["pixel_values"] = tensors["pixel_values"].to(self._dtype)
        return ids, tensors

    def _keep(self, key: int, fields: dict[str, Tensor], *, newest: bool) -> None:
        """Keep tensors if there is room. The `newest` image gets room from the oldest images."""
        size = _bytes_of(fields)
        with self._lock:
            while newest and self._fields and self._bytes + size > KEPT_BYTES:
                self._bytes -= _bytes_of(self._fields.pop(next(iter(self._fields))))
            if key not in self._fields and self._bytes + size <= KEPT_BYTES:
                self._fields[key] = fields
                self._bytes += size

    def fields(self, image: Image) -> dict[str, Tensor]:
        """Return an image's tensors, on the CPU."""
        if (fields := self._fields.get(image.key)) is None:
            with self._processing:
                # The tensors are equal bit for bit, because the file has the same pixels.
                fields = self._processed(image.open())[1]
            # Drop no other image, because passes use all images in turn and would need that image sooner.
            self._keep(image.key, fields, newest=False)
        return fields

    def train_on(self, images: Iterable[Image]) -> None:
        """Hold the images that an update's batch names by key, and forget all unused images."""
        self._trained = set(images)
        with self._lock:
            self._fields = {k: f for k, f in self._fields.items() if k in self._known}
            self._bytes = sum(map(_bytes_of, self._fields.values()))

    def of_keys(self, keys: Sequence[int]) -> list[Image]:
        """Return the images of a batch's row; the key -1 stands for no image."""
        return [self._known[key] for key in keys if key >= 0]

    def expand(self, ids: list[int], images: Sequence[Image]) -> list[int]:
        """Replace the template's placeholders by the tokens of the images, in their order."""
        if ids.count(self.written_id) != len(images):
            raise ValueError(
                f"the chat template writes {ids.count(self.written_id)} placeholders for {len(images)} "
                f"image(s): set a `chat_template` that writes {self.written!r} for each image"
            )
        left, row = iter(images), list[int]()
        for token in ids:
            row += next(left).ids if token == self.written_id else (token,)
        return row

    def extents(self, ids: list[int], images: Sequence[Image]) -> list[tuple[int, int]]:
        """Return where the tokens of each image begin and end in a row."""
        found, end = list[tuple[int, int]](), 0
        for image in images:
            start = ids.index(self.image_id, end) - image.ids.index(self.image_id)
            end = start + len(image.ids)
            if tuple(ids[start:end]) != image.ids:
                raise ValueError(f"the tokens from {start} to {end} are not those of {image!r}")
            found.append((start, end))
        if self.image_id in ids[end:]:
            raise ValueError(f"a row has more image tokens than its {len(images)} image(s)")
        return found

    def fitting(self, ids: list[int], images: list[Image], room: int) -> tuple[list[int], list[Image]]:
        """Cut a row to `room` tokens, before the first image that does not fit."""
        extents = self.extents(ids, images)
        room = min([room, *(start for start, end in extents if end > room)])
        return ids[:room], images[: sum(end <= room for _, end in extents)]

    def without_oldest(
        self, ids: list[int], images: list[Image], count: int
    ) -> tuple[list[int], list[Image]]:
        """Cut the tokens of the first `count` images out of a row. Return the row and the other images."""
        row = list(ids)
        for start, end in reversed(self.extents(ids, images)[:count]):
            del row[start:end]
        return row, images[count:]

    def keys(
        self,
        ids: list[int],
        images: Sequence[Image],
        number: Callable[[Image], int] = lambda image: image.key,
    ) -> list[int]:
        """Return a row in which negative numbers, made of image and place, replace the image tokens.

        Rows are equal in tokens and in pixels if and only if their keys are equal.
        """
        row = list(ids)
        for image, (start, end) in zip(images, self.extents(ids, images), strict=True):
            first = number(image) << PLACE_BITS
            for place in range(start, end):
                if row[place] == self.image_id:
                    row[place] = -1 - (first | (place - start))
        return row

    def positions(self, ids: list[int], images: Sequence[Image]) -> Tensor | None:
        """Return the positions of a row's tokens [axes, L], or None if they are 0, 1, 2, ..."""
        import torch

        if self.rope_index is None:
            return None
        if not images:
            return torch.arange(len(ids)).expand(3, -1)
        row = torch.tensor([ids])
        grids = torch.tensor([image.grid for image in images])
        kinds = (row == self.image_id).int()
        found: Tensor = self.rope_index(row, mm_token_type_ids=kinds, image_grid_thw=grids)[0]
        return found[:, 0]

    def joined(self, images: Sequence[Image], device: torch.device) -> dict[str, Tensor]:
        """Return the tensors of one pass over these images, in the order of their tokens."""
        import torch

        parts = [self.fields(image) for image in images]
        names = {*parts[0]} if parts else set()
        # Idefics3 and SmolVLM have [1, tiles, ...].
        side = int(bool(parts) and parts[0]["pixel_values"].ndim == 5)
        if "image_sizes" in names:
            # LLaVA-NeXT has [images, tiles, ...]; its model cuts the padding by the sizes.
            most, side = max(part["pixel_values"].size(1) for part in parts), 0
            parts = [{**p, "pixel_values": _with_tiles(p["pixel_values"], most)} for p in parts]
        return {name: torch.cat([p[name] for p in parts], side).to(device) for name in names}

    def model_inputs(self, images: Sequence[Image], ids: Tensor) -> dict[str, Tensor]:
        """Return the images of token rows [B, L] in the form of a model that computes positions itself."""
        kinds = {} if self.kinds is None else {self.kinds: (ids == self.image_id).int()}
        return self.joined(images, ids.device) | kinds

    def samples(self) -> list[Image]:
        """Return two small images of one size, for probes."""
        from PIL import Image as Pillow

        (width, height), noise = SAMPLE_SIDES, random.Random(0)
        pixels = [noise.randbytes(3 * width * height) for _ in range(2)]
        return [self.read(Pillow.frombytes("RGB", SAMPLE_SIDES, each)) for each in pixels]

    def upstream_inputs(self, rows: Sequence[Sequence[Image]], ids: Tensor) -> dict[str, Any]:
        """Return the images of token rows [B, L] under the names that TRL's methods take."""
        from torch.nn.utils.rnn import pad_sequence

        images = [image for row in rows for image in row]
        inputs: dict[str, Any] = self.model_inputs(images, ids)
        if not images:
            return inputs
        side = -1 if "image_sizes" in inputs else inputs["pixel_values"].ndim - 4
        sizes = {i: self.fields(i)["pixel_values"].size(max(side, 0)) for i in images}
        tiles = [sum(sizes[image] for image in row) for row in rows]
        if side == 1:
            for name in {*inputs} - {self.kinds}:
                inputs[name] = pad_sequence(inputs[name][0].split(tiles), batch_first=True)
        elif side == 0:
            inputs["num_tiles"] = tiles
        return {**inputs, "num_images": [len(row) for row in rows]}

    def padded_inputs(self, rows: Sequence[Sequence[Image]], ids: Tensor) -> dict[str, Any]:
        """Return the images of token rows [B, L] in the form of a model's `generate`."""
        inputs = self.upstream_inputs(rows, ids)
        return {name: x for name, x in inputs.items() if name not in ("num_images", "num_tiles")}

    def generation_inputs(self, rows: Any, ids: list[list[int]]) -> dict[str, Any]:
        """Return the images of token rows in the form of TRL's generation, which pads the tokens."""
        import torch

        inputs = self.padded_inputs(rows, torch.tensor([]))
        if self.kinds is not None:
            inputs[self.kinds] = [[int(token == self.image_id) for token in row] for row in ids]
        return inputs


def _bytes_of(fields: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in fields.values())


def _with_tiles(pixels: Tensor, count: int) -> Tensor:
    """Pad pixels [1, tiles, 3, H, W] with empty tiles."""
    from torch.nn.functional import pad

    return pad(pixels, (0, 0, 0, 0, 0, 0, 0, count - pixels.size(1)))


def _pixels(picture: Any) -> Any:
    """Return the upright RGB pixels of an image of Pillow, or raise ValueError."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    if not isinstance(picture, Pillow.Image):
        raise ValueError(f"an image is {picture!r:.60}; allowed is an image of Pillow")
    width, height = picture.size
    file = getattr(picture, "filename", "")
    name = f"an image ({file})" if file else "an image"
    # A phone's photo is an MPO file. Its further frames are other views of the photo.
    if getattr(picture, "is_animated", False) and picture.format != "MPO":
        raise ValueError(f"{name} is animated; allowed is one picture")
    if not 0 < width * height <= MOST_PIXELS:
        raise ValueError(f"{name} has {width} x {height} pixels; allowed are 1 to {MOST_PIXELS}")
    try:
        picture = ImageOps.exif_transpose(picture)
        if picture.mode.startswith("I;16"):
            # `convert` alone turns all values above 255 white.
            picture = picture.convert("I").point(lambda grey: grey * (1 / 256)).convert("L")
        if picture.mode in ("I", "F") and not 0 <= min(ends := picture.getextrema()) <= max(ends) <= 255:
            raise ValueError(f"its mode {picture.mode!r} has values of {ends}; allowed are 0 to 255")
        if "A" in picture.getbands() or picture.info.get("transparency") is not None:
            # Put the image on white, as transformers does: `convert` alone shows colours under transparency.
            picture = picture.convert("RGBA")
            white = Pillow.new("RGBA", picture.size, "white")
            picture = Pillow.alpha_composite(white, picture)
        return picture.convert("RGB")
    except Exception as error:
        # Decoders of damaged files raise various errors.
        raise ValueError(f"{name} cannot be decoded: {error}") from error


def is_image(block: Any) -> bool:
    """Return whether a content block is an image in TRL's form."""
    return isinstance(block, dict) and block.get("type") == "image"


def images_of(messages: Any) -> list[Image]:
    """Return the images of messages that were read, in their order."""
    contents = [m.get("content") for m in messages] if isinstance(messages, list) else []
    blocks = (b for content in contents if isinstance(content, list) for b in content)
    return [block.get("image") for block in blocks if is_image(block)]


def as_blocks(content: Any) -> Any:
    """Return content as a list of blocks; text becomes a block if it is not empty."""
    if not isinstance(content, str):
        return content
    return [{"type": "text", "text": content}] if content else []


def clipped(content: Any, most: int | None) -> Any:
    """Return content with at most `most` characters of each text."""
    if isinstance(content, str):
        return content[:most]
    return [{**b, "text": b["text"][:most]} if "text" in b else b for b in content]


def replaced(messages: Any, shown: Callable[[dict[str, Any]], dict[str, Any]]) -> Any:
    """Return messages, or a text, with each image block replaced."""
    if not images_of(messages):
        return messages
    contents = [as_blocks(m.get("content") or "") for m in messages]
    seen = [[shown(b) if is_image(b) else b for b in content] for content in contents]
    return [{**m, "content": content} for m, content in zip(messages, seen, strict=True)]


def told(messages: Any) -> Any:
    """Return messages as text, with the size of each image in its place."""

    def named_image(block: dict[str, Any]) -> dict[str, Any]:
        image: Any = block.get("image")
        if not isinstance(image, Image) and hasattr(image, "size"):
            image = "[image {}x{}]".format(*image.size)
        return {"text": str(image)}

    named = replaced(messages, named_image)
    if named is messages:
        return messages
    return [{**m, "content": "".join(b["text"] for b in m["content"])} for m in named]


def with_pictures(messages: Any) -> Any:
    """Return messages with images of Pillow, as reward functions read them."""

    def shown(block: dict[str, Any]) -> dict[str, Any]:
        # The prompt of a failed episode may hold images that were never read.
        image = block.get("image")
        return {**block, "image": image.open()} if isinstance(image, Image) else block

    return replaced(messages, shown)
