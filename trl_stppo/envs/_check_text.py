"""The checks of text environments."""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ._check_session import Session, global_generators
from ._check_values import Step, check_opening, check_step, violation

LONG_OBSERVATION = 20_000
ODD_ACTIONS = ("", " \n", "\x00", "<answer>", '{"name": ', "9" * 400, "no such thing \u2603")
# Readable by nothing in particular; a caller who wants more of the game to be seen passes `actions`.
DEFAULT_ACTIONS = ("hello", "1", "<answer>1</answer>", "<action>up</action>", "\\boxed{1}")


@dataclass
class Trace:
    """What one episode said."""

    opening: str
    steps: list[Step] = field(default_factory=list)

    def said(self) -> list[Any]:
        """What has to repeat itself if nothing is random."""
        return [self.opening, *((s.observation, s.reward, s.terminated) for s in self.steps)]


def check_text(
    session: Session,
    env: Any,
    rows: Sequence[dict[str, Any]],
    actions: Sequence[str] | None,
    steps: int,
    *,
    several: bool,
) -> None:
    """Check an environment with `reset` and `step`.

    Args:
        session: makes and calls the instances, keeps the smells.
        env: a new instance.
        rows: at least one.
        actions: what is played, from the start again when it is used up.
        steps: turns of an episode at most.
        several: whether a second instance can be made.
    """
    _check_step_signature(env)
    played = actions or DEFAULT_ACTIONS
    traces = [_play(session, env, row, played, steps) for row in rows]
    for trace in traces:
        _smell(session, env, trace)
    repeats = _check_fresh_start(session, env, rows[0], played, traces[0])
    _check_after_end(session, env, rows[0], played, traces[0])
    _check_odd_actions(session, env, rows[0])
    if several and repeats:
        _check_sharing(session, rows, played, traces[0])


def _check_step_signature(env: Any) -> None:
    signature = inspect.signature(env.step)
    try:
        signature.bind("action")
    except TypeError as error:
        raise violation(
            f"{type(env).__name__}.step{signature} cannot be called with one text ({error})",
            "step(action)",
            "more parameters than the action",
            "write def step(self, action: str)",
        ) from None


def _reset(session: Session, env: Any, row: dict[str, Any]) -> str:
    result = session.call(env, "reset", **row)
    return check_opening(f"{type(env).__name__}.reset", result, tools=False)


def _step(session: Session, env: Any, action: str) -> Step:
    return check_step(f"{type(env).__name__}.step", session.call(env, "step", action))


def _play(
    session: Session, env: Any, row: dict[str, Any], actions: Sequence[str], steps: int
) -> Trace:
    trace = Trace(_reset(session, env, row))
    for turn in range(steps):
        trace.steps.append(_step(session, env, actions[turn % len(actions)]))
        if trace.steps[-1].ended:
            break
    return trace


def _smell(session: Session, env: Any, trace: Trace) -> None:
    name = type(env).__name__
    longest = max(map(len, [trace.opening, *(s.observation for s in trace.steps)]))
    if longest > LONG_OBSERVATION:
        session.warn(
            f"{name} says up to {longest:,} characters at once, which fills the model's context. "
            f"Cut it, or say only what is new."
        )
    if any("valid_action" not in step.info for step in trace.steps):
        session.warn(
            f"{name}.step returns no info['valid_action'], so that the share of readable actions "
            f"cannot be shown. Return it (a bool) on every turn."
        )
    last = trace.steps[-1] if trace.steps else None
    if last is not None and last.ended and last.info.get("success") is None:
        session.warn(
            f"{name}.step ends an episode without info['success'], so that the success rate cannot "
            f"be shown. Return it (a bool) on the last turn, if the task has one."
        )
    if last is not None and last.terminated and last.truncated:
        session.warn(
            f"{name}.step returned both terminated and truncated. It counts as terminated: nothing "
            f"is to come. Return only truncated if the state still has a value."
        )
    rewards = [step.reward for step in trace.steps]
    if len(set(rewards)) >= 3 and rewards in (sorted(rewards), sorted(rewards, reverse=True)):
        session.warn(
            f"{name}.step returned rewards that only ever {'rise' if rewards[-1] > rewards[0] else 'fall'}, "
            f"as a running sum does: {[round(r, 4) for r in rewards[:6]]}. A reward belongs to its "
            f"turn alone. If this is a score, return its difference to the turn before."
        )


def _check_fresh_start(
    session: Session, env: Any, row: dict[str, Any], actions: Sequence[str], first: Trace
) -> bool:
    """Play a row again and again; whether that repeats the instance's very first episode."""
    name, generators = type(env).__name__, global_generators()
    traces, after = [], []
    for seed in (1, 2):
        for _, _, _, set_seed in generators.values():
            set_seed(seed)
        _reset(session, env, row)
        after.append({label: state() for label, (state, *_) in generators.items()})
        _step(session, env, actions[0])  # an episode that is given up, as budgets make them
        traces.append(_play(session, env, row, actions, len(first.steps)))
    reseeded = [label for label in generators if after[0][label] == after[1][label]]
    if reseeded:
        session.warn(
            f"{name}.reset reseeds {' and '.join(reseeded)} of the whole process: the trainer's own "
            f"sampling would repeat itself, and episodes in other threads change. Use a generator "
            f"of your own, for example random.Random(seed)."
        )
    if any(trace.opening != first.opening for trace in traces):
        session.warn(
            f"{name}.reset opens the same row differently another time. If a row stands for one "
            f"task, clear the old episode's state, or draw from a generator that is seeded from "
            f"row['seed']."
        )
        return False
    if any(trace.said() != first.said() for trace in traces):
        session.warn(
            f"{name}.step answers the same actions on the same row differently in another episode. "
            f"Clear everything in reset, or draw from a generator that is seeded from row['seed']."
        )
        return False
    return True


def _check_after_end(
    session: Session, env: Any, row: dict[str, Any], actions: Sequence[str], first: Trace
) -> None:
    trace = _play(session, env, row, actions, len(first.steps))
    if not trace.steps or not trace.steps[-1].ended:
        return
    try:
        late = _step(session, env, actions[0])
    except Exception:
        return  # refusing is the best answer
    if not late.ended:
        session.warn(
            f"{type(env).__name__}.step goes on after the end of the episode. Raise, or report the "
            f"end again: otherwise a mistake in the caller stays unseen."
        )


def _check_odd_actions(session: Session, env: Any, row: dict[str, Any]) -> None:
    ended = True
    for action in ODD_ACTIONS:
        if ended:
            _reset(session, env, row)
        ended = _step(session, env, action).ended
    _reset(session, env, row)


def _check_sharing(
    session: Session,
    rows: Sequence[dict[str, Any]],
    actions: Sequence[str],
    reference: Trace,
) -> None:
    """Two instances at once: each must behave as if it were alone."""
    one, other = session.make(), session.make()
    trace = Trace(_reset(session, one, rows[0]))
    _reset(session, other, rows[-1])
    other_ended = False
    for turn in range(len(reference.steps)):
        if not other_ended:
            # Another action than the first instance's, so that a shared state does not go unseen.
            other_ended = _step(session, other, actions[(turn + 1) % len(actions)]).ended
        trace.steps.append(_step(session, one, actions[turn % len(actions)]))
        if trace.steps[-1].ended:
            break
    again = _reset(session, one, rows[0])
    if trace.said() != reference.said() or again != reference.opening:
        raise violation(
            f"Two instances of {type(one).__name__} change each other: one that is stepped alternately "
            f"with another answers differently than alone",
            "instances that share nothing that changes",
            "a list or dict as a class attribute or default argument, a module-level variable, or "
            "one client or file for all",
            "create the state in __init__ or reset",
        )
