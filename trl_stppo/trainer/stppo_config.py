"""Settings of `STPPOTrainer`: PPOConfig's, plus the two pieces of the paper."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from ..core.clip_bias import NORMALIZATION_MODES as MODES
from .ppo_config import PPOConfig

# variant -> (importance_sampling_level, whether the clipping-bias correction is on)
VARIANTS = {
    "ppo": ("token", False),
    "turn-ppo": ("turn", False),
    "s-ppo": ("token", True),
    "st-ppo": ("turn", True),
}
# Modes whose scale has the unit of one over a gradient, so that they cannot multiply an update.
GRADIENT_UNIT_MODES = ("triggered", "floor")
ESTIMATORS = ("exact", "logits")
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


@dataclass(repr=False)
class STPPOConfig(PPOConfig):
    r"""Configuration of [`STPPOTrainer`].

    All of [`PPOConfig`] is inherited. `variant` sets the two fields below it; setting one of them to
    a value that contradicts the variant is an error.

    Parameters:
        variant (`str`, *optional*): `"ppo"`, `"turn-ppo"`, `"s-ppo"` or `"st-ppo"` (default);
            `None` leaves the two fields free.
        importance_sampling_level (`str`, *optional*): `"token"`, `"turn"` or `"sequence"`.
        clip_bias_normalization (`str`, *optional*): `"none"`, `"triggered"`, `"floor"`, `"relative"`
            or `"share"`; see `trl_stppo.core.clip_bias`.
        clip_bias_power (`float`): exponent of `"share"`.
        clip_bias_target (`str`): what the scale multiplies, `"gradient"` or `"update"`. Adam divides
            a constant gradient scale out again; the update is what it cannot undo.
        clip_bias_estimator (`str`, *optional*): `"exact"`, from the gradients themselves, or
            `"logits"`, an estimate of the two norms' ratio that needs no second gradient. Default:
            exact, except where DeepSpeed or FSDP shards the gradients.
        log_clip_bias (`bool`, *optional*): measure the norm of the clipping bias also where it is not
            corrected, at the price of a second backward pass. Default: only where it is corrected.
        max_clip_bias_ratio (`float`, *optional*): stop the run, with a checkpoint, when
            `clip_bias/norm` over `clip_bias/grad_norm` exceeds it for `collapse_patience` steps.

    Source: arXiv:2511.20718v1, Sections 4 and 5; modes `"floor"`, `"relative"`, `"share"` and the
    target `"update"` are this package's own.
    """

    _TRAINER: ClassVar[str] = "STPPOTrainer"
    _VALID_LEVELS: ClassVar[tuple[str, ...]] = ("token", "turn", "sequence")
    _VARIANTS: ClassVar[dict[str, tuple[str, bool]]] = VARIANTS

    variant: str | None = field(
        default="st-ppo", metadata={"help": f"One of {', '.join(VARIANTS)}."}
    )
    importance_sampling_level: str | None = field(
        default=None, metadata={"help": "'token', 'turn' or 'sequence'; set by variant."}
    )
    clip_bias_normalization: str | None = field(
        default=None, metadata={"help": f"One of {', '.join(MODES)}; set by variant."}
    )
    clip_bias_power: float = field(default=4.0, metadata={"help": "Exponent of 'share'."})
    clip_bias_target: str = field(default="update", metadata={"help": "'gradient' or 'update'."})
    clip_bias_estimator: str | None = field(
        default=None, metadata={"help": "'exact' or 'logits'; exact unless gradients are sharded."}
    )
    log_clip_bias: bool | None = field(
        default=None, metadata={"help": "Measure the clipping bias where it is not corrected."}
    )
    max_clip_bias_ratio: float | None = field(
        default=None, metadata={"help": "Stop when norm(C) / norm(g) stays above it."}
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

    def _resolve_variant(self) -> None:
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
        return ValueError(
            f"`{name}={getattr(self, name)!r}` contradicts `variant={self.variant!r}`, which means "
            f"{expected!r}. Choose the variant that fits: "
            + ", ".join(
                f"{variant!r} = {level} ratio, correction {'on' if on else 'off'}"
                for variant, (level, on) in self._VARIANTS.items()
            )
            + "; or set variant=None."
        )

    def _check_clip_bias(self) -> None:
        mode = self.clip_bias_normalization
        if self.log_clip_bias is None:
            self.log_clip_bias = mode != "none" or self.max_clip_bias_ratio is not None
        elif not self.log_clip_bias and mode != "none":
            raise ValueError(
                f"`log_clip_bias=False` contradicts `clip_bias_normalization={mode!r}`, which measures "
                f"it anyway. Leave it unset."
            )
        if self.max_clip_bias_ratio is not None and not self.log_clip_bias:
            raise ValueError(
                f"`max_clip_bias_ratio={self.max_clip_bias_ratio}` contradicts `log_clip_bias=False`: what "
                f"is not measured has no limit. Leave log_clip_bias unset."
            )
        if self.max_clip_bias_ratio is not None and self.max_clip_bias_ratio <= 0:
            raise ValueError(
                f"`max_clip_bias_ratio={self.max_clip_bias_ratio}`: must satisfy "
                f"max_clip_bias_ratio > 0 or None."
            )
        if self.clip_bias_power <= 0:
            raise ValueError(f"`clip_bias_power={self.clip_bias_power}`: must be positive.")
        if self.clip_bias_target not in ("gradient", "update"):
            raise ValueError(
                f"`clip_bias_target={self.clip_bias_target!r}`: allowed are 'gradient' and 'update'."
            )
        if self.clip_bias_estimator not in (None, *ESTIMATORS):
            raise ValueError(
                f"`clip_bias_estimator={self.clip_bias_estimator!r}`: allowed are "
                f"{', '.join(map(repr, ESTIMATORS))}, or None to let the engine decide."
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
