"""Recorded episodes: the files of a training, and their page (docs/watching.md); without torch.

`trl_stppo.trainer.recording.recorder` records them.
"""

from .files import read_trace
from .format import VERSION, TracedEpisode, TracedUpdate
from .page import build_page

__all__ = ["VERSION", "TracedEpisode", "TracedUpdate", "build_page", "read_trace"]
