"""What the first rollout says of turns that no environment could read."""

from types import SimpleNamespace

import pytest

from trl_stppo.trainer.loop.log import warn_of_invalid


def episode(valid, *said):
    messages = [
        {"role": "assistant", "content": "", "tool_calls": text}
        if isinstance(text, list)
        else {"role": "assistant", "content": text}
        for text in said
    ]
    return SimpleNamespace(valid_actions=valid, messages=messages)


@pytest.mark.parametrize(
    ("episodes", "shown"),
    [
        ([episode([True, False], "5", "prose"), episode([False], "more prose")], "'prose'"),
        ([episode([False], [{"name": "search"}])], "search"),
        ([episode([True, True, True, False], "5", "6", "7", "prose")], None),
        # Nobody knows which of its turns was the invalid one.
        ([episode([False], "5", "prose")], None),
        ([], None),
    ],
)
def test_an_invalid_turn_is_shown_if_most_are(episodes, shown, caplog):
    warn_of_invalid(episodes)
    assert (shown in caplog.text) if shown else not caplog.records
