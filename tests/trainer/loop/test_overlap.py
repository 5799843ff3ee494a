"""`rollout_overlap`: the run with `rollout_staleness=1`, bit for bit, whatever the clocks do."""

import pytest

from tests.kit.overlapping import OVERLAP, STALE, assert_equal, end_of, trainer_for
from tests.kit.tiers import quick


@pytest.mark.parametrize("kind", ["full", "lora", "separate", "groups"])
def test_an_overlapped_run_is_the_run_with_episodes_one_update_old(kind, tmp_path):
    ends = []
    for name, options in (("stale", STALE), ("overlapped", OVERLAP)):
        trainer = trainer_for(tmp_path / name, kind, **options)
        trainer.train()
        ends.append(end_of(trainer))
    assert_equal(*ends)
