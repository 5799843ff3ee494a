"""A grid as an image: a red agent goes to a green goal, and sees a new screenshot after each move."""

import random
from typing import Any

from PIL import Image

CELLS, PIXELS = 3, 8
MOVES = {"u": (0, -1), "d": (0, 1), "l": (-1, 0), "r": (1, 0)}
GREY, RED, GREEN = (128, 128, 128), (255, 0, 0), (0, 255, 0)
MAX_MOVES = 4


class Grid:
    """Pays 1 for reaching the goal within four moves. `blind` shows the same grey image always."""

    def __init__(self, blind: bool = False) -> None:
        self.blind = blind

    def reset(self, seed: int = 0) -> tuple[Image.Image, dict[str, Any]]:
        """Place agent and goal; return the first screenshot."""
        cells = [(x, y) for x in range(CELLS) for y in range(CELLS)]
        self.agent, self.goal = random.Random(seed).sample(cells, 2)
        self.moves = 0
        return self.screenshot(), {}

    def step(self, action: str) -> tuple[Image.Image, float, bool, bool, dict[str, Any]]:
        """Move the agent by a letter: u, d, l or r."""
        self.moves += 1
        move = MOVES.get(action.strip())
        if move is not None:
            self.agent = tuple(
                min(CELLS - 1, max(0, at + by)) for at, by in zip(self.agent, move, strict=True)
            )
        won = self.agent == self.goal
        over = not won and self.moves >= MAX_MOVES
        info: dict[str, Any] = {"valid_action": move is not None}
        if won or over:
            info["success"] = won
        return self.screenshot(), float(won), won, over, info

    def screenshot(self) -> Image.Image:
        """Return the grid as an image of 24 x 24 pixels."""
        side = CELLS * PIXELS
        image = Image.new("RGB", (side, side), GREY)
        if not self.blind:
            for (x, y), colour in ((self.goal, GREEN), (self.agent, RED)):
                image.paste(colour, (PIXELS * x + 1, PIXELS * y + 1, PIXELS * x + 7, PIXELS * y + 7))
        return image
