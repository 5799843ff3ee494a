"""Recorded episodes of a training: trace files, and an HTML page (docs/watching.md). Needs no torch."""

from .files import VERSION, TracedEpisode, TracedUpdate, read_trace
from .page import build_page

__all__ = ["VERSION", "TracedEpisode", "TracedUpdate", "build_page", "read_trace"]
