"""Settings of `STPPOTrainer`: PPOConfig's, plus those of the paper's ratio and correction."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from ..core.clip_bias import NORMALIZATION_MODES as MODES
from .config.names import Preset, option, takes_old_names
from .guards.stop_when import conditions
from .ppo_config import PPOConfig

# variant -> (importance_sampling_level, whether the clipping-bias correction is on)
VARIANTS = {
    "ppo": ("token", False),
    "turn-ppo": ("turn", False),
    "s-ppo": ("token", True),
    "st-ppo": ("turn", True),
}
# What a level means that is set alone.
BY_LEVEL = {"token": "s-ppo", "turn": "st-ppo"}
# Modes whose scale has the unit of one over a gradient, so that they cannot multiply an update.
GRADIENT_UNIT_MODES = ("triggered", "floor")
ESTIMATORS = ("auto", "exact", "logits")
# Optimizers whose step is proportional to the learning rate, so that scaling it scales the step.
LINEAR_OPTIMIZERS = ("adam", "adafactor", "sgd", "adagrad", "rmsprop", "lion", "ademamix")
# ... except these relatives, which keep state that depends on the learning rate, or step early.
NONLINEAR_OPTIMIZERS = (
    *("schedulefree", "layerwise", "lomo", "galore", "apollo"),
    *("asgd", "dadapt"),
)


def check_linear(optimizer: str) -> None:
    """Refuse an optimizer whose step is not proportional to its learning rate."""
    name = optimizer.lower().replace("_", "")
    linear = any(part in name for part in LINEAR_OPTIMIZERS)
    if not linear or any(part in name for part in NONLINEAR_OPTIMIZERS):
        raise ValueError(
            f"`clip_bias_target='update'` with the optimizer {optimizer!r} is not supported: the scale "
            f"acts through the learning rate, and that optimizer's step is not known to be proportional "
            f"to it. Use an AdamW, SGD or Adafactor variant, or clip_bias_target='gradient'."
        )


@takes_old_names
@dataclass(repr=False)
class STPPOConfig(PPOConfig):
    """Configuration of [`STPPOTrainer`]: all of [`PPOConfig`], and the paper's ratio and correction.

    `variant` sets `importance_sampling_level` and `clip_bias_normalization`; setting one of them to a value
    that contradicts the variant is an error. A level without a variant chooses it.

    Source: arXiv:2511.20718v1, Sections 4 and 5; the signals of the modes `"floor"`, `"relative"`
    and `"share"` are this package's own. To scale the step, as the target `"update"` does, is VCPO's
    (arXiv:2602.17616).
    """

    _TRAINER: ClassVar[str] = "STPPOTrainer"
    _VALID_LEVELS: ClassVar[tuple[str, ...]] = ("token", "turn", "sequence")
    _VARIANTS: ClassVar[dict[str, tuple[str, bool]]] = VARIANTS
    _BY_LEVEL: ClassVar[dict[str, str]] = BY_LEVEL

    variant: str | None = option(
        Preset("st-ppo"), f"One of {', '.join(VARIANTS)}, or None: free choice."
    )
    importance_sampling_level: str | None = option(
        None, "'token', 'turn' or 'sequence'; set by variant, or chooses it."
    )
    clip_bias_normalization: str | None = option(
        None, f"One of {', '.join(MODES)} (docs/algorithm.md); set by variant."
    )
    clip_bias_power: float = option(4.0, "Exponent of 'share'.")
    clip_bias_target: str = option(
        "update",
        "What the scale multiplies, 'gradient' or 'update'. Adam divides a constant gradient "
        "scale out again; the update is what it cannot undo.",
    )
    clip_bias_estimator: str | None = option(
        None,
        "How the norm of the clipping bias is measured: 'exact', from the gradients "
        "themselves; 'logits', an estimate that needs no second gradient; 'auto', exact unless "
        "gradients are sharded. None is as auto, but only where it is corrected or in stop_when: "
        "elsewhere it costs a second backward pass.",
    )

    def __post_init__(self) -> None:
        if self.clip_bias_normalization not in (None, *MODES):
            raise ValueError(
                f"`clip_bias_normalization={self.clip_bias_normalization!r}`: allowed are "
                f"{', '.join(map(repr, MODES))}."
            )
        self._resolve_variant()
        super().__post_init__()
        self._check_clip_bias()

    def _variant_of_level(self, default: str) -> str | None:
        """Which variant a level means, alone or with a correction; None where none has this name."""
        level, mode = self.importance_sampling_level, self.clip_bias_normalization
        if level is None:
            return str.__str__(default)  # which is a word like any other from here on
        if mode is None:
            return self._BY_LEVEL.get(level)
        wanted = level, mode != "none"
        return next((name for name, pair in self._VARIANTS.items() if pair == wanted), None)

    def _resolve_variant(self) -> None:
        if isinstance(self.variant, Preset):
            self.variant = self._variant_of_level(self.variant)
        if self.variant is None:
            self.importance_sampling_level = self.importance_sampling_level or "turn"
            self.clip_bias_normalization = self.clip_bias_normalization or "none"
            return
        if self.variant not in self._VARIANTS:
            raise ValueError(
                f"`variant={self.variant!r}`: allowed are {', '.join(map(repr, self._VARIANTS))}, or None to "
                f"set importance_sampling_level and clip_bias_normalization freely."
            )
        level, corrected = self._VARIANTS[self.variant]
        if self.importance_sampling_level is None:
            self.importance_sampling_level = level
        elif self.importance_sampling_level != level:
            raise self._contradiction("importance_sampling_level", level)
        if self.clip_bias_normalization is None:
            self.clip_bias_normalization = "share" if corrected else "none"
        elif (self.clip_bias_normalization != "none") != corrected:
            raise self._contradiction(
                "clip_bias_normalization", "a mode other than 'none'" if corrected else "none"
            )

    def _contradiction(self, name: str, expected: str) -> ValueError:
        level, mode = self.importance_sampling_level, self.clip_bias_normalization
        fitting = [
            repr(variant)
            for variant, (its_level, corrects) in self._VARIANTS.items()
            if its_level == level and (mode is None or (mode != "none") == corrects)
        ]
        other = f"Choose the variant that fits: {', '.join(fitting)}; or set" if fitting else "Set"
        return ValueError(
            f"`{name}={getattr(self, name)!r}` contradicts `variant={self.variant!r}`, which means "
            f"{expected!r}. {other} variant=None."
        )

    def _check_clip_bias(self) -> None:
        mode = self.clip_bias_normalization
        if self.clip_bias_power <= 0:
            raise ValueError(f"`clip_bias_power={self.clip_bias_power}`: must be positive.")
        if self.clip_bias_target not in ("gradient", "update"):
            raise ValueError(
                f"`clip_bias_target={self.clip_bias_target!r}`: allowed are 'gradient' and 'update'."
            )
        if self.clip_bias_estimator not in (None, *ESTIMATORS):
            raise ValueError(
                f"`clip_bias_estimator={self.clip_bias_estimator!r}`: allowed are "
                f"{', '.join(map(repr, ESTIMATORS))}, or None."
            )
        if self.clip_bias_estimator == "logits":
            self.check_estimator()
        if mode == "triggered" and not 0 < (self.max_grad_norm or 0.0) < math.inf:
            raise ValueError(
                f"`clip_bias_normalization='triggered'` needs `max_grad_norm` > 0 and finite, got "
                f"{self.max_grad_norm}: it amplifies the gradient while the bias is small and relies "
                f"on the gradient clip. Set max_grad_norm=1.0."
            )
        if self.clip_bias_target == "update" and mode != "none":
            self._check_update_target()

    @property
    def measures_clip_bias(self) -> bool:
        """Whether the clipping bias is measured: where it is corrected, asked for, or watched."""
        watched = (condition.metric for condition in conditions(self.stop_when))
        asked = self.clip_bias_estimator is not None
        corrected = self.clip_bias_normalization != "none"
        return corrected or asked or any(metric.startswith("clip_bias/") for metric in watched)

    def check_estimator(self) -> None:
        """Refuse what the estimate in the space of the logits cannot do."""
        if self.clip_bias_normalization != "none" and self.clip_bias_target == "gradient":
            raise ValueError(
                "`clip_bias_target='gradient'` needs the exact gradients, but only the estimate in the "
                "space of the logits is to be had (clip_bias_estimator='logits', or an engine that "
                "shards gradients). Set clip_bias_target='update'."
            )

    def _check_update_target(self) -> None:
        if self.clip_bias_normalization in GRADIENT_UNIT_MODES:
            raise ValueError(
                f"`clip_bias_normalization={self.clip_bias_normalization!r}` has the unit of a gradient "
                f"and cannot scale the update. Set clip_bias_target='gradient', or use 'relative' or "
                f"'share'."
            )
        check_linear(str(getattr(self.optim, "value", self.optim)))
