"""What `--help` says of each command: an explanation, the flags one needs first, examples."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import fill, indent


@dataclass(frozen=True)
class Page:
    """One command's help.

    Attributes:
        summary: one line, for the list of commands.
        about: one paragraph.
        usage: what follows the command's name.
        first: the flags one needs first, each with what it means.
        examples: whole command lines.
        more: a last sentence.
    """

    summary: str
    about: str = ""
    usage: str = "[--config FILE] [--flag VALUE ...]"
    first: dict[str, str] = field(default_factory=dict)
    examples: tuple[str, ...] = ()
    more: str = "All flags: --help_all. Each may stand in the YAML file, without its dashes."

    def text(self, command: str) -> str:
        """The page."""
        width = max(map(len, self.first), default=0)
        flags = [f"  {flag:{width}}  {meaning}" for flag, meaning in self.first.items()]
        lines = [indent(example, "  ") for example in self.examples]
        parts = [f"usage: trl-stppo {command} {self.usage}", fill(self.about, 92)]
        parts += ["\n".join(["first flags:", *flags])] if flags else []
        parts += ["\n".join(["examples:", *lines])] if lines else []
        return "\n\n".join([*parts, self.more]) + "\n"


PAGES: dict[str, Page] = {
    "train": Page(
        "train an agent",
        "Trains a language-model agent over several turns in an environment, with one of the variants "
        "of PPO and GRPO. Flags and YAML are those of STPPOConfig (TRL's GRPOConfig and more), "
        "ModelConfig and a few for the task; a flag beats the file. Flags of `accelerate launch` "
        "(--num_processes, --mixed_precision, ...) start several processes.",
        first={
            "--config FILE": "YAML file of flags",
            "--model_name_or_path NAME": "what to train: a folder, or a model of the Hub",
            "--dataset_name NAME": "its rows: a file (rows.jsonl), a folder, or a data set of the Hub",
            "--environment MODULE:CLASS": "where it acts (default: the demo's)",
            "--variant NAME": "st-ppo, s-ppo, turn-ppo, ppo; no critic: st-grpo, grpo, gspo, ...",
            "--output_dir FOLDER": "where checkpoints, curves and the model go",
        },
        examples=(
            "trl-stppo train --config run.yaml --dry_run           # check it, and see what it takes",
            "trl-stppo train --config run.yaml --variant ppo --seed 1",
            "trl-stppo train --config run.yaml --accelerate_config zero2 --num_processes 4",
            "trl-stppo train --config run.yaml --resume_from_checkpoint auto",
        ),
    ),
    "evaluate": Page(
        "compare agents on held-out rows",
        "Plays every held-out row once per agent and prints success with its interval, per data set and "
        "averaged, agents side by side. It takes the flags and files of `train`; only the task, the "
        "limits of an episode and the eval_* settings count, and no critic or optimizer is loaded.",
        first={
            "--config FILE": "YAML file of the training",
            "--models NAME ...": "agents: folders, adapters, checkpoints, models of the Hub",
            "--labels NAME ...": "their names in the tables",
            "--output FILE": "writes the tables as .json, .md and .csv",
            "--max_rows N": "rows of each data set at most",
        },
        examples=(
            "trl-stppo evaluate --config run.yaml --models runs/agent",
            "trl-stppo evaluate --config run.yaml --models base runs/ppo --output runs/table",
        ),
    ),
    "estimate": Page(
        "the memory of a run, before it",
        "Adds up what a run would take of each GPU, phase by phase, from flags and files as `train` "
        "takes them or from a model's name alone. Computed from shapes: no weights are loaded, and no "
        "GPU is needed. docs/single_gpu.md says how far off it may be.",
        first={
            "--model NAME": "the model (short for --model_name_or_path)",
            "--qlora, --lora": "4-bit weights with adapters, or 16-bit ones; neither: all is trained",
            "--length N": "tokens of an episode (max_completion_length)",
            "--rows N": "episodes per micro-batch (per_device_train_batch_size)",
            "--card GB": "the GPU: says whether it fits, and what would take less",
        },
        examples=(
            "trl-stppo estimate --model Qwen/Qwen2.5-7B-Instruct --qlora --length 4096 --card 24",
            "trl-stppo estimate --config run.yaml --accelerate_config zero3",
        ),
    ),
    "show": Page(
        "play episodes with a model and show their tokens",
        "Plays a few episodes with a model and prints every token, coloured by role and turn: grey is "
        "the prompt, blue what the environment said, green and yellow in turn what the model sampled; "
        "special tokens are reversed.",
        first={
            "--model_name_or_path NAME": "the agent",
            "--environment MODULE:CLASS": "where it acts",
            "--dataset_name NAME": "where the rows come from; --index N is the first of them",
            "--row JSON": "a row of your own instead",
            "--greedy": "the likeliest token each time",
        },
        examples=(
            "trl-stppo show --model_name_or_path runs/demo --index 3 --episodes 2 --logprobs",
            "trl-stppo show --model_name_or_path runs/mine --environment my_env:MyEnv \\\n"
            '    --row \'{"prompt": "Go."}\' --greedy',
        ),
    ),
    "env check": Page(
        "look for what would break or spoil a training in an environment",
        "Makes the environment, plays a few rows and looks for what breaks the contract (an error) or "
        "is allowed but usually a mistake (a warning): rewards that are no numbers, state that two "
        "instances share, seeds that change the world, and more (docs/environments.md).",
        usage="MODULE:CLASS [--flag VALUE ...]",
        first={
            "MODULE:CLASS": "the environment, or a function that makes one",
            "--rows FILE": "rows to play: .json, .jsonl, .csv or .parquet",
            "--arguments JSON": "arguments of the class, as in '{\"size\": 4}'",
            "--action TEXT": "a turn to play, once for each; tools: 'dig {\"depth\": 2}'",
            "--strict": "warnings fail too",
        },
        examples=(
            "trl-stppo env check my_env:MyEnv --rows rows.jsonl",
            "trl-stppo env check my_env:MyEnv --action 'go left' --action 'go right' --strict",
        ),
        more="All flags: --help_all.",
    ),
    "env play": Page(
        "play an environment yourself",
        "Shows what the model would read and takes one line per turn; a backslash at its end continues "
        'it on the next, `:q` stops. A tool is called as `dig {"depth": 2}`.',
        first={
            "--environment MODULE:CLASS": "what to play (default: a search over Python's own docs)",
            "--row JSON": "the row to play",
            "--dataset_name NAME": "or where it comes from; --index N says which",
            "--environment_kwargs JSON": "arguments of the class",
            "--model_name_or_path NAME": "whose chat template and tokens to show",
        },
        examples=(
            "trl-stppo env play",
            'trl-stppo env play --environment my_env:MyEnv --row \'{"prompt": "Go."}\'',
        ),
    ),
    "trace": Page(
        "one HTML page of a run's recorded episodes",
        "Writes one page that needs no network: the episodes that the run has recorded "
        "(--trace_episodes of `train`), to filter and sort, with every token coloured by role, ratio, "
        "advantage, value, or whether it was clipped (docs/trace.md).",
        usage="RUN [--flag VALUE ...]",
        first={
            "RUN": "output_dir of a run, or the trace folder in it",
            "--output FILE": "the page (default RUN/trace.html)",
            "--max_episodes N": "of more, take N evenly (default 2000; 0 for all)",
            "--open": "open it in the browser",
        },
        examples=("trl-stppo trace runs/demo --open",),
        more="All flags: --help_all.",
    ),
    "plot": Page(
        "curves of one run or several",
        "Draws what runs have logged: success, clipping, KL, gradients and their bias, the critic. Runs "
        "that differ in their seed alone become one line with a band. Runs that are still going on are "
        "read as far as they are (docs/watching.md).",
        usage="RUN ... [--flag VALUE ...]",
        first={
            "RUN ...": "output_dir of each run",
            "--output FILE": ".png, .svg or .pdf",
            "--metrics NAME ...": "figures by their names in the log",
            "--smooth N": "average the last N values",
            "--table": "print the final figures instead",
        },
        examples=(
            "trl-stppo plot runs/demo",
            "trl-stppo plot runs/ppo-0 runs/ppo-1 runs/st-0 runs/st-1 --output compared.svg",
        ),
        more="All flags: --help_all.",
    ),
}
OVERVIEW = """\
usage: trl-stppo COMMAND [--flag VALUE ...]

Trains language-model agents over several turns with PPO, ST-PPO and their variants.

commands:
{commands}

first steps:
  trl-stppo env check my_env:MyEnv       # is my environment sound?
  trl-stppo estimate --model NAME --qlora --card 24
  trl-stppo train --config run.yaml --dry_run
  trl-stppo train --config run.yaml

trl-stppo COMMAND --help explains a command. --version prints versions; --debug before the command, or
TRL_STPPO_DEBUG=1, shows where an error came from.
"""


def overview() -> str:
    """What `trl-stppo --help` says."""
    width = max(map(len, PAGES))
    return OVERVIEW.format(
        commands="\n".join(f"  {name:{width}}  {page.summary}" for name, page in PAGES.items())
    )
