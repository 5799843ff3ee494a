"""Predict a run's GPU memory.

Adds up what a run would take of each GPU, phase by phase, from flags and files as `train` takes them
(--help_all lists them) or from a model's name alone. Computed from shapes and settings: no weights are
loaded, and no GPU is needed. docs/lab/measurements.md says how far off it may be.

Examples:
    trl-stppo estimate --model Qwen/Qwen2.5-7B-Instruct --qlora --rows 1 --length 4096 --card 24
    trl-stppo estimate --config run.yaml --accelerate_config zero3
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..models.memory import FITS, GIB, Estimate, Setup, estimate
from ..trainer.watching.memory import hints, longest_prompt
from .agent_models import check_policy
from .agents import load_splits, rows_are_here
from .arguments import EstimateArguments, TrainArguments
from .dry_run import Findings, local_tokenizer, parsed
from .early import peeked
from .flag_types import flag_types
from .flags import FlagParser, divided
from .launches import launched_as, launcher
from .names import check_name
from .plan_rows import planned_run
from .planned import Plan, planned_setup, smallest_card
from .usage import UsageError

# Short flags -> those of `train` that they stand for.
SHORT = {
    "model": "--model_name_or_path",
    "length": "--max_completion_length",
    "rows": "--per_device_train_batch_size",
}
ADAPTERS = "--use_peft true --lora_target_modules all-linear --dtype bfloat16"
FOUR_BITS = "--load_in_4bit true --use_bnb_nested_quant true"


def run(words: Sequence[str]) -> int:
    """Print the table; 0 where it fits the card that is named, or none is, else 1."""
    words, card = translated(words)
    own, launch_words = divided(flag_types(TrainArguments, words), words)
    if peeked(own, "model_name_or_path", None) is None:
        raise UsageError(
            "`--model` is missing. Name a checkpoint, a model of the Hub, or a --config."
        )
    launch = launcher(own, launch_words)
    with launched_as(launch):
        planned = parsed(own, launch, Findings())
        check_policy(planned.model_args)
        check_name("value_model_name_or_path", planned.config.value_model_name_or_path)
        planned.on_cpu = planned.on_cpu and card is None
        planned.prompt = prompt_tokens(planned)
        setup = planned_setup(planned, fetch=True)
    if isinstance(setup, str):
        raise ValueError(f"The memory of this run is not known: {setup}.")
    expected = estimate(setup)
    console = Console(highlight=False)
    console.print(table(planned, expected))
    for line in verdict(setup, expected, card):
        console.print(line, markup=False, soft_wrap=True)
    return int(card is not None and expected.peak > FITS * card * GIB)


def translated(words: Sequence[str]) -> tuple[list[str], float | None]:
    """The words with short flags replaced, and the card's size in GB."""
    short: EstimateArguments
    short, rest = FlagParser([EstimateArguments]).parse_args_into_dataclasses(
        words, return_remaining_strings=True, look_for_args_file=False
    )
    given = {flag: getattr(short, name) for name, flag in SHORT.items()}
    found = [
        word for flag, value in given.items() if value is not None for word in (flag, str(value))
    ]
    found += ADAPTERS.split() if short.lora or short.qlora else []
    found += FOUR_BITS.split() if short.qlora else []
    return [*found, *rest], None if short.card is None else _size(short.card)


def _size(said: str) -> float:
    with contextlib.suppress(ValueError):
        if (size := float(said.upper().removesuffix("GB"))) > 0:
            return size
    raise UsageError(f"`--card {said}`: write its memory in GB, as in --card 24.")


def prompt_tokens(planned: Plan) -> int:
    """Tokens of the longest prompt where the rows are here, else 0: nothing is fetched for it."""
    model_args = planned.model_args
    tokenizer = local_tokenizer(model_args.model_name_or_path, model_args.model_revision)
    with contextlib.suppress(Exception):
        if rows_are_here(planned.args):
            return longest_prompt(load_splits(planned.args)[0], tokenizer)
    return 0


def table(planned: Plan, expected: Estimate) -> Table:
    """What is alive in each phase."""
    model_args, config, launch = planned.model_args, planned.config, planned.launch
    title = f"{model_args.model_name_or_path}: {planned_run(planned).training}"
    per = "per process" if launch.processes == 1 else f"each of {launch.processes} processes"
    engine = "" if launch.engine == "none" else f", {launch.engine}"
    caption = (
        f"{per}{engine}; episodes of {config.max_completion_length} tokens, "
        f"{f'prompts of {planned.prompt}' if planned.prompt else 'prompts not included'}, "
        f"{config.per_device_train_batch_size} per micro-batch"
    )
    result = Table(title=escape(title), caption=escape(caption))
    for name, side in (("phase", "left"), ("GiB", "right"), ("of that", "left")):
        result.add_column(name, justify=side)
    for name in expected.phases:
        style = "bold" if name == expected.phase else ""
        result.add_row(name, f"{expected.total(name) / GIB:.1f}", expected.parts(name), style=style)
    return result


def verdict(setup: Setup, expected: Estimate, card: float | None) -> list[str]:
    """Whether it fits, and what would take less."""
    peak = f"peak: about {expected.peak / GIB:.1f} GiB, in the {expected.phase}"
    if setup.device == "cpu":
        return [f"{peak}, on a CPU (use_cpu); --card says whether it fits a GPU"]
    if card is None:
        return [f"{peak}; smallest common card: {smallest_card(expected.peak)}"]
    usable = f"a {card:g} GB card ({FITS * card:.1f} GiB usable)"
    if expected.peak <= FITS * card * GIB:
        return [f"{peak}; fits {usable}"]
    lines = [f"{peak}; does not fit {usable}"]
    return lines + [f"  {text} (saves {saved / GIB:.1f} GiB)" for text, saved in hints(setup)]
