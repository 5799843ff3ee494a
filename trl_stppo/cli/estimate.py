"""Predict a run's GPU memory.

Computes the memory of each phase of a run on each GPU, from the flags and files of `train`, or from a model's
name alone. It needs only shapes and settings, no weights and no GPU. docs/lab/measurements.md has its error.

    --model NAME      the model; short for --model_name_or_path
    --length N        tokens of an episode; short for --max_completion_length
    --rows N          episodes per micro-batch; short for --per_device_train_batch_size
    --lora, --qlora   adapters on 16-bit or 4-bit weights; without them all weights are trained
    --card GB         a GPU's memory: show if the run fits, and settings that make it smaller

--help_all lists all flags.

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

from ..models.memory import FITS, GIB, Estimate, estimate
from ..models.memory_of_runs import hints
from .agent_models import check_models
from .agents import load_splits, rows_are_here
from .arguments import TrainArguments
from .flags import divided, flag_types
from .launch import as_words, launch_flags, launched_as, planned_launch
from .planned import Plan, how_trained, longest_prompt, memory_line, planned, planned_setup
from .usage import Parser, UsageError

# Short flag -> the flag of `train`.
SHORT = {
    "model": "--model_name_or_path",
    "length": "--max_completion_length",
    "rows": "--per_device_train_batch_size",
}
ADAPTERS = "--use_peft true --lora_target_modules all-linear --dtype bfloat16"
FOUR_BITS = "--load_in_4bit true --use_bnb_nested_quant true"


def run(words: Sequence[str]) -> int:
    """Print the memory table; return 1 if the run does not fit the GPU of `--card`, else 0."""
    words, card = translated(words)
    flags, rest, settings = divided(flag_types(TrainArguments, words), words, launch_flags())
    launch = planned_launch([*as_words(settings), *rest])
    with launched_as(launch):
        plan = planned(flags, launch)
        check_models(plan.model_args, plan.config.value_model_name_or_path)
        with contextlib.suppress(Exception):
            if rows_are_here(plan.args):  # rows are not downloaded for the length of the prompts
                plan.train = load_splits(plan.args)[0]
        plan.prompt = longest_prompt(plan)
        setup = planned_setup(plan, fetch=True)
    expected, console = estimate(setup), Console(highlight=False)
    console.print(table(plan, expected))
    lines = [memory_line(setup)]
    fits = card is None or expected.peak <= FITS * card * GIB
    if card is not None:
        usable = f"a {card:g} GB card ({FITS * card:.1f} GiB usable)"
        peak = lines[0].partition(";")[0]
        lines = [f"{peak}; {'fits' if fits else 'does not fit'} {usable}"]
    if not fits:
        lines += [f"  {text} (saves {saved / GIB:.1f} GiB)" for text, saved in hints(setup)]
    console.print("\n".join(lines), markup=False, soft_wrap=True)
    return int(not fits)


def translated(words: Sequence[str]) -> tuple[list[str], float | None]:
    """Replace the short flags by those of `train`; also return the memory of `--card` in GB, or None."""
    parser = Parser(add_help=False)
    for name in (*SHORT, "card"):
        parser.add_argument(f"--{name}")
    for name in ("lora", "qlora"):
        parser.add_argument(f"--{name}", action="store_true")
    short, rest = parser.parse_known_args(words)
    preset = f"{ADAPTERS} {FOUR_BITS if short.qlora else ''}" if short.lora or short.qlora else ""
    rest = [*preset.split(), *rest]  # flags of `train` come last and win
    for name, flag in SHORT.items():
        if getattr(short, name) is not None:
            rest = [flag, getattr(short, name), *rest]
    if short.card is None:
        return rest, None
    with contextlib.suppress(ValueError):
        if (size := float(short.card.upper().removesuffix("GB"))) > 0:
            return rest, size
    raise UsageError(f"`--card {short.card}`: must be its memory in GB, as in --card 24.")


def table(plan: Plan, expected: Estimate) -> Table:
    """Return a printable table of the predicted memory in each phase of the run."""
    config, launch = plan.config, plan.launch
    title = f"{plan.model_args.model_name_or_path}: {how_trained(plan)}"
    per = "per process" if launch.processes == 1 else f"each of {launch.processes} processes"
    engine = "" if launch.engine == "none" else f", {launch.engine}"
    prompts = f"prompts of {plan.prompt}" if plan.prompt else "prompts not included"
    caption = (
        f"{per}{engine}; episodes of {config.max_completion_length} tokens, {prompts}, "
        f"{config.per_device_train_batch_size} per micro-batch"
    )
    result = Table(title=escape(title), caption=escape(caption))
    for name, side in (("phase", "left"), ("GiB", "right"), ("of that", "left")):
        result.add_column(name, justify=side)
    for name in expected.phases:
        style = "bold" if name == expected.phase else ""
        result.add_row(name, f"{expected.total(name) / GIB:.1f}", expected.parts(name), style=style)
    return result
