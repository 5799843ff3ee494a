"""Recorded episodes of a training: trace files, and an HTML page (docs/watching.md). Needs no torch."""

from .files import read_trace
from .format import VERSION, TracedEpisode, TracedUpdate
from .page import build_page

__all__ = ["VERSION", "TracedEpisode", "TracedUpdate", "build_page", "read_trace"]
