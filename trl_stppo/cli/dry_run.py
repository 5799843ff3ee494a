"""What `train --dry_run` does: decide what a training decides before it loads a model, and show it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..envs.check import check_env
from ..errors import EnvironmentContractError
from ..redaction import redacted
from ..trainer.planning import plan
from ..trainer.planning.rewards import check_reward_weights
from .agent_models import TokenCounter, check_policy
from .agents import (
    check_splits,
    load_environment,
    load_eval_environment,
    load_rewards,
    load_splits,
    rows_are_here,
)
from .launch import launched_as, planned_launch
from .planned import (
    Plan,
    local_tokenizer,
    longest_prompt,
    memory_line,
    planned,
    planned_setup,
    resolved,
)
from .usage import UsageError, check_name, looks_like_path


class Findings:
    """What would stop the run, and what could not be looked at."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def check(self, call: Callable[..., Any], *args: Any) -> Any:
        """The call's result; what it raises is a problem, and gives None."""
        try:
            return call(*args)
        except Exception as error:
            self.problems.append(str(error) or type(error).__name__)


def dry_run(words: Sequence[str], launch_words: Sequence[str] = ()) -> int:
    """Print the plan of a run; 0 if it would start, 1 if not.

    Raises:
        UsageError: the words make no sense.
    """
    found, launch = Findings(), planned_launch(launch_words)
    with launched_as(launch):
        run = planned(words, launch)
        look(run, found)
        rows = resolved(run)
        try:
            rows["memory"] = memory_line(planned_setup(run))
        except ValueError as error:
            rows["memory"] = str(error)
    if os.environ.get("RANK", "0") != "0":
        return int(bool(found.problems))
    console, table = Console(highlight=False), Table(title="What would run", show_header=False)
    for name, value in rows.items():
        table.add_row(name, escape(redacted(value)))
    console.print(table)
    for kind, texts in (("note", found.notes), ("PROBLEM", found.problems)):
        for text in dict.fromkeys(texts):
            console.print(redacted(f"{kind}: {text}"), markup=False, soft_wrap=True)
    console.print("This would not start." if found.problems else "OK")
    return int(bool(found.problems))


def look(run: Plan, found: Findings) -> None:
    """Make all but the weights, by the functions that a training calls."""
    args, config, model_args = run.args, run.config, run.model_args
    found.check(check_policy, model_args)
    found.check(check_name, "value_model_name_or_path", config.value_model_name_or_path)
    rewards = found.check(load_rewards, args) or []
    found.check(check_reward_weights, config, len(rewards))
    held_out = None
    try:
        run.train, held_out = load_splits(args)
    except Exception as error:  # of the Hub's rows nothing is known here
        wrong = isinstance(error, UsageError) or any(map(looks_like_path, args.row_sources))
        (found.problems if wrong or rows_are_here(args) else found.notes).append(str(error))
    if run.train is not None:
        found.check(check_splits, args, config, run.train, held_out)
    counter: Any = TokenCounter(str(model_args.model_name_or_path), model_args.model_revision)
    if local_tokenizer(run) is None:
        counter = len  # of characters, which are no fewer
    factory = found.check(load_environment, args, counter)
    run.prompt = longest_prompt(run)
    if factory is None and args.environment not in (None, "none"):
        return
    found.check(load_eval_environment, args, counter)
    rollout = found.check(plan.plan_rollout, config, factory, None, None)
    if rollout is None:
        return
    if not rollout.pays and not rewards:
        found.problems.append("Nothing pays a reward: set `environment` or `reward_funcs`.")
    if run.train is not None:
        found.check(plan.check_dataset, run.train, config, rollout)
    if factory is not None and run.train is not None:
        found.check(_play, factory, run, found)


def _play(factory: Any, run: Plan, found: Findings) -> None:
    """Play two rows as `env check` does; a server that is not reached from here is a note."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check_env(factory, list(islice(run.train, 2)))
        except EnvironmentContractError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            found.notes.append(str(error))
