"""What upstream must find on the class: one-line delegates to the helpers that do the work."""

from __future__ import annotations

from ._trl import GRPOTrainer


class UpstreamHooks(GRPOTrainer):
    """GRPOTrainer that asks our helpers wherever it would do something else itself."""
