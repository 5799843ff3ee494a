"""Recorded episodes: the files that a training writes, and the page that shows them.

`trl_stppo.trainer.recording.recorder` records; everything here works on plain data, without torch.
`docs/watching.md` describes the page, `format.py` each field.
"""

from .files import read_trace
from .format import VERSION, TracedEpisode, TracedUpdate
from .page import build_page

__all__ = ["VERSION", "TracedEpisode", "TracedUpdate", "build_page", "read_trace"]
