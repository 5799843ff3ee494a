"""The verdict on an optimizer step."""

from __future__ import annotations

from enum import StrEnum


class Verdict(StrEnum):
    """The outcome of a mini-batch, equal on all processes.

    The schedule and `global_step` go on in every case.

    ```
                   policy                        critic            counted in
    TAKEN          steps                         steps
    CRITIC_ONLY    keeps its weights             steps             guard/empty_steps, without warm-up
    NOT_FINITE     keeps its weights             keeps its weights guard/skipped_steps
    TAKEN_BACK     weights before the last step  steps             step/taken_back
    REFUSED        keeps its weights             steps
    TARGET_KL      keeps its weights             keeps its weights guard/kl_stopped_steps
    EMPTY          keeps its weights             keeps its weights guard/empty_steps
    ```

    TAKEN_BACK and REFUSED: the KL is above the limit of `trust_region`, after a step and without one. A
    policy that is not finite after a step is taken back, too. A critic whose gradient is not finite keeps its
    weights. TARGET_KL also holds for the rest of the rollout batch. The last step of an update is TAKEN
    before it is measured, and may still be taken back.
    """

    TAKEN = "taken"
    CRITIC_ONLY = "critic_only"
    NOT_FINITE = "not_finite"
    TAKEN_BACK = "taken_back"
    REFUSED = "refused"
    TARGET_KL = "target_kl"
    EMPTY = "empty"


# Verdicts with which the critic takes its step.
CRITIC_STEPS = (Verdict.TAKEN, Verdict.CRITIC_ONLY, Verdict.TAKEN_BACK, Verdict.REFUSED)
