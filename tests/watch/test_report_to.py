"""Every integration of `report_to` can take the logs."""

import math

from transformers import TrainerCallback

from tests.kit.scripted import scripted_trainer

ODD = {
    "rewards/<lambda>/mean": [math.nan],
    "clip ‖C‖ (x)/ü": [0.5],
    "too/large": [math.inf],
}


class Own(TrainerCallback):
    """A callback of the user's."""

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        self.seen.append(dict(logs))


# Known as one of upstream's by where it is from.
Integration = type("Integration", (Own,), {"__module__": "transformers.integrations.of_a_test"})


def test_integrations_get_numbers_only_and_the_history_everything(tmp_path):
    integration, own = Integration(), Own()
    trainer, _ = scripted_trainer(tmp_path, callbacks=[integration, own])
    trainer._metrics["train"].update(ODD)
    trainer.train()
    entry, _ = trainer.state.log_history
    assert entry["rewards/<lambda>/mean"] is None
    assert entry["too/large"] == math.inf
    first, _ = integration.seen
    assert {*entry} - {*first} == {"rewards/<lambda>/mean", "too/large", "step"}
    assert all(isinstance(v, (int, float)) and math.isfinite(v) for v in first.values())
    assert {*entry} - {*own.seen[0]} == {"step"}, "the user's callbacks miss nothing"
