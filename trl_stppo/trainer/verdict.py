"""The facts about an optimizer step that is due, and the verdict on it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """The outcome of a mini-batch, equal on all processes.

    The schedule and `global_step` go on in every case.

    ```
                   policy                        critic            counted in
    TAKEN          steps                         steps
    CRITIC_ONLY    keeps its weights             steps             guard/empty_steps, not in a warm-up
    NOT_FINITE     keeps its weights             keeps its weights guard/skipped_steps
    REFUSED        keeps its weights             steps             step/refused
    EMPTY          keeps its weights             keeps its weights guard/empty_steps
    ```

    REFUSED: the policy's KL is above the limit of `trust_region`.
    """

    TAKEN = "taken"
    CRITIC_ONLY = "critic_only"
    NOT_FINITE = "not_finite"
    REFUSED = "refused"
    EMPTY = "empty"


# Verdicts with which the critic takes its step.
CRITIC_STEPS = (Verdict.TAKEN, Verdict.CRITIC_ONLY, Verdict.REFUSED)


@dataclass(frozen=True)
class StepReport:
    """The facts about an optimizer step that is due; equal on all processes, but for `detail`.

    Attributes:
        figures: metrics of the step.
        faults: the parts that are not finite, with their processes; "" if there are none.
        detail: what is not finite; "" except on the main process and processes with non-finite losses.
        is_weightless: whether the weights of all episodes are 0.
        exceeds: whether the policy's KL is above the limit of the trust region.
    """

    figures: dict[str, float] = field(default_factory=dict)
    faults: str = ""
    detail: str = ""
    is_weightless: bool = False
    exceeds: bool = False
