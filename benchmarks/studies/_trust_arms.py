"""Arms of `trust.toml`: the default with estimated norms."""

from __future__ import annotations

from typing import Any

from trl_stppo import STPPOTrainer


class Estimated(STPPOTrainer):
    """STPPOTrainer with estimated norms."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["args"].measure_clip_bias("logits")
        super().__init__(*args, **kwargs)
