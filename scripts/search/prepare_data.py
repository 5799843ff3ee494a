"""Turn question-answering data sets into rows for `train_stppo.py --dataset_name` (docs/recipes.md).

python scripts/search/prepare_data.py --train nq hotpotqa \
    --eval nq triviaqa popqa hotpotqa 2wikimultihopqa musique bamboogle --output data/search
"""

from __future__ import annotations

import argparse
import sys

from search_rows import DATASETS, check_output, prepare, save


def parser() -> argparse.ArgumentParser:
    """The flags."""
    known = ", ".join(DATASETS)
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--train", nargs="+", default=[], metavar="NAME", help=f"of {known}")
    flags.add_argument("--eval", nargs="+", default=[], metavar="NAME", help="likewise")
    flags.add_argument("--output", required=True, help="a new folder")
    flags.add_argument("--local", metavar="DIR", help="copies of the repositories: DIR/owner/name/..")
    flags.add_argument(
        "--revision",
        nargs="+",
        default=[],
        metavar="OWNER/NAME=REVISION",
        help="pin repositories on the Hub to a branch, tag or commit",
    )
    flags.add_argument("--max_train_rows", type=int, metavar="N", help="of each data set")
    flags.add_argument("--max_eval_rows", type=int, metavar="N", help="of each data set")
    flags.add_argument("--seed", type=int, default=0)
    flags.add_argument(
        "--without_context", action="store_true", help="leave PubMedQA's abstracts out of prompts"
    )
    return flags


def revisions(pairs: list[str]) -> dict[str, str]:
    """`owner/name=revision` as a dictionary."""
    found = {}
    for pair in pairs:
        hub, _, revision = pair.partition("=")
        if not revision or "/" not in hub:
            raise ValueError(f"--revision has {pair!r}; write it as owner/name=revision.")
        found[hub] = revision
    return found


def main() -> None:
    args = parser().parse_args()
    try:
        check_output(args.output)  # not after an hour of loading
        prepared = prepare(
            args.train,
            args.eval,
            local=args.local,
            revisions=revisions(args.revision),
            max_train_rows=args.max_train_rows,
            max_eval_rows=args.max_eval_rows,
            seed=args.seed,
            context=not args.without_context,
        )
        for split in ("train", "eval"):
            for name, counts in prepared.report[split].items():
                print(f"{split} {name}: {counts['kept']:,} of {counts['read']:,} rows")
        folder = save(prepared, args.output)
    except (
        ValueError,
        OSError,
    ) as error:  # what the reader can mend; ConnectionError is an OSError
        sys.exit(f"{type(error).__name__}: {error}")
    print(f"rows: {folder}")


if __name__ == "__main__":
    main()
