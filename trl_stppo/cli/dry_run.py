"""`train --dry_run`: check and show the settings of a run before a model loads."""

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
from ..trainer.planning.data import training_rows
from ..trainer.planning.rewards import check_reward_weights
from . import agents
from . import planned as plans
from .agent_models import TokenCounter, check_policy
from .launch import launched_as, planned_launch
from .usage import UsageError, check_name, looks_like_path


class Findings:
    """Problems that would stop the run, and notes on what could not be checked."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.notes: list[str] = []

    def check(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call a function and return its result; record an error as a problem and return None."""
        try:
            return call(*args)
        except Exception as error:
            self.problems.append(str(error) or type(error).__name__)


def dry_run(words: Sequence[str], launch_words: Sequence[str] = ()) -> int:
    """Print the plan of a run; return 0 if it would start, 1 if not."""
    found, launch = Findings(), planned_launch(launch_words)
    with launched_as(launch):
        run = plans.planned(words, launch)
        look(run, found)
        rows = plans.resolved(run)
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


def look(run: plans.Plan, found: Findings) -> None:
    """Build all parts of a training but the weights, and collect the errors in `found`."""
    args, config, model_args = run.args, run.config, run.model_args
    found.check(check_policy, model_args)
    found.check(check_name, "value_model_name_or_path", config.value_model_name_or_path)
    rewards = found.check(agents.load_rewards, args) or []
    found.check(check_reward_weights, config, len(rewards))
    held_out = None
    try:
        run.train, held_out = agents.load_splits(args)
    except Exception as error:
        # Rows of the Hub are not downloaded.
        wrong = isinstance(error, UsageError) or any(map(looks_like_path, args.row_sources))
        (found.problems if wrong or agents.rows_are_here(args) else found.notes).append(str(error))
    if run.train is not None:
        found.check(agents.check_splits, args, config, run.train, held_out)
    counter: Any = TokenCounter(str(model_args.model_name_or_path), model_args.model_revision)
    if plans.local_tokenizer(run) is None:
        # A text has at least as many characters as tokens.
        counter = len
    factory = found.check(agents.load_environment, args, counter)
    if factory is None and args.environment not in (None, "none"):
        return
    found.check(agents.load_eval_environment, args, counter)
    agent = found.check(agents.load_agent, args)
    rollout = found.check(plan.plan_rollout, config, factory, None, None, agent)
    if rollout is None:
        return
    if not rollout.pays and not rewards:
        found.problems.append("There is no reward: set `environment`, `agent` or `reward_funcs`.")
    if run.train is not None:
        found.check(training_rows, run.train, config, rollout)
    if factory is not None and run.train is not None:
        found.check(_play, factory, run, found)


def _play(factory: Any, run: plans.Plan, found: Findings) -> None:
    """Play two rows to check the environment. An unreachable server becomes a note, not a problem."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            check_env(factory, list(islice(run.train, 2)))
        except EnvironmentContractError as error:
            if not isinstance(error.__cause__, OSError):
                raise
            found.notes.append(str(error))
