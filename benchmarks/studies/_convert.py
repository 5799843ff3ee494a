"""Convert the records of five drivers, as they are at commit ec4ecce, into the one form."""

import gzip
import json
import subprocess
import tomllib
from pathlib import Path

BEFORE, NEW = "ec4ecce", Path("benchmarks/studies/records")
PRESSURES = {
    "none": (1, 4, 0),
    "epochs": (4, 4, 0),
    "stale": (4, 4, 2),
    "both": (8, 4, 4),
    "overlap": (1, 4, 1),
    "tutorial": (2, 4, 0),
}


def git(*words):
    return subprocess.run(["git", *words], capture_output=True, check=True).stdout


def first_seen(name):
    """Commit and date that first recorded each key."""
    seen, log = (
        {},
        git(
            "log",
            "--follow",
            "--name-only",
            "--format=@%h %ad",
            "--date=short",
            BEFORE,
            "--",
            f"benchmarks/studies/{name}.jsonl.gz",
        ).decode(),
    )
    commits, current = [], None
    for line in log.splitlines():
        if line.startswith("@"):
            current = line[1:].split()
        elif line.strip():
            commits.append((*current, line.strip()))
    for commit, date, path in reversed(commits):
        data = git("show", f"{commit}:{path}")
        for line in gzip.decompress(data).splitlines():
            seen.setdefault(tuple(json.loads(line)["key"]), (commit, date))
    return seen


def rows_of(name):
    data = gzip.decompress(git("show", f"{BEFORE}:benchmarks/studies/{name}.jsonl.gz"))
    rows = [json.loads(line) for line in data.splitlines()]
    seen = first_seen(name)
    for row in rows:
        recorded, row["date"] = seen[tuple(row["key"])]
        row.setdefault("commit", recorded)
    return rows


def record(
    study, task, arm, setting, seed, overrides, trainer, row, measure="success", evaluation=None
):
    curves = {
        ("success" if n == "episode/success_rate" else n): v for n, v in row["curves"].items()
    }
    rollouts = max(map(len, curves.values()), default=0)
    return {
        "study": study,
        "task": task,
        "arm": arm,
        "setting": setting,
        "seed": seed,
        "overrides": overrides,
        "rollouts": rollouts,
        "trainer": trainer,
        "measure": measure,
        "left_out": [],
        "evaluation": evaluation,
        "curves": curves,
        "error": row["error"],
        "seconds": row.get("seconds", row.get("cpu")),
        "cpu": row.get("cpu"),
        "commit": row["commit"],
        "date": row["date"],
        "versions": {},
        "processor": None,
    }


def tested(row):
    return {"before": row["test"][0], "after": row["test"][-1]}


def old_task(name):
    kind = name.rsplit("-", 1)[0] if name[-1].isdigit() else name
    return "demo-0.1.0" if kind == "demo" else kind  # its agent was the demo's of 0.1.0


def of_cell(cell):
    epochs, _, stale = PRESSURES[cell["pressure"]]
    found = {
        "learning_rate": cell["learning_rate"],
        "num_iterations": epochs,
        "cliprange": cell["cliprange"],
        "lam": 0.95,
    }
    return found | ({"rollout_staleness": stale} if stale else {})


def rivals():
    for row in rows_of("rivals"):
        stage, _, arm, *_ = row["key"]
        cell = row["cell"]
        trainer = {"groups": "STGRPOTrainer", "credit": "CreditTrainer"}.get(stage, "RivalTrainer")
        overrides = of_cell(cell) | ({"base": row["base"]} if row["base"] != 1.0 else {})
        yield record(
            f"rivals {stage}",
            old_task(cell["task"]),
            arm,
            f"{row['level']} {cell['learning_rate']:g}",
            cell["seed"],
            overrides,
            trainer,
            row,
            evaluation=tested(row),
        )


def solved():
    for row in rows_of("solved"):
        stage, _, arm, *_ = row["key"]
        cell = row["cell"]
        trainer = "GRPOTrainer" if arm == "trl-grpo" else "SolvedTrainer"
        yield record(
            f"solved {stage}",
            old_task(cell["task"]),
            arm,
            f"{row['level']} {cell['learning_rate']:g}",
            cell["seed"],
            of_cell(cell),
            trainer,
            row,
            evaluation=tested(row),
        )


def start():
    study = tomllib.loads(Path("benchmarks/studies/start.toml").read_text())
    seen = {}
    for row in rows_of("start"):
        arm, cell = row["key"][2], row["cell"]
        task, rate = old_task(cell["task"]), cell["learning_rate"]
        own = study["arms"][arm]
        trainer = own.get("trainer", "STPPOTrainer")
        if task == "house":
            row["curves"] = {
                ("reward" if n == "episode/success_rate" else n): v
                for n, v in row["curves"].items()
            }
            found = record(
                "start",
                task,
                arm,
                f"{rate:g}",
                cell["seed"],
                {"learning_rate": rate, **own},
                trainer,
                row,
                "reward",
            )
        else:
            overrides = of_cell(cell)
            del overrides["cliprange"], overrides["lam"]
            found = record(
                "start",
                task,
                arm,
                f"{row['level']} {rate:g}",
                cell["seed"],
                {**overrides, **own},
                trainer,
                row,
                evaluation=tested(row),
            )
        key = (task, arm, found["setting"], found["seed"])
        if key in seen:
            assert seen[key]["curves"]["reward"] == found["curves"]["reward"], key
            print("same run twice:", key)
            continue
        seen[key] = found
        yield found


def relay():
    chosen = {"turn": 0.95, "token": 0.98, "token-ppo": 0.98}
    live = tomllib.loads(Path("benchmarks/studies/relay.toml").read_text())["arms"]
    for row in rows_of("relay"):
        arm, lam = row["arm"], row["lam"]
        row["curves"]["reward"] = row["curves"].pop("episode/score")
        task = {"facts": "relay-facts", "swaps": "relay-swaps"}.get(row["stage"], "relay")
        setting = "default" if lam == chosen.get(arm, lam) else f"lam {lam:g}"
        group = arm in ("grpo", "rloo")
        overrides = {
            "credit": arm.removesuffix("-ppo"),
            "variant": "ppo" if arm.endswith("-ppo") else "turn-ppo",
            "lam": lam,
        }
        overrides = live.get(arm, overrides) if setting == "default" else overrides
        yield record(
            "relay",
            task,
            arm,
            setting,
            row["seed"],
            overrides,
            "STGRPOTrainer" if group else "STPPOTrainer",
            row,
            "reward",
        )


def guide():
    live = tomllib.loads(Path("benchmarks/studies/guide.toml").read_text())["arms"]
    for row in rows_of("practitioner"):
        world, reward, method, demonstrations, rate, seed = row["key"]
        task = (
            "textworld"
            + ("-hard" if world == "hard" else "")
            + ("-dense" if reward == "dense" else "")
        )
        setting = "default" if demonstrations == "0" else f"{demonstrations} demonstrations"
        overrides = dict(live[method])
        if demonstrations != "0":
            overrides |= {"demonstrations": int(demonstrations), "sft_rate": float(rate)}
        if seed == "100":
            setting += f" at {float(rate):g}"
        evaluation = tested(row)
        if len(row["test"]) == 4:
            evaluation |= {"other_before": row["test"][1], "other_after": row["test"][2]}
        yield record(
            "guide",
            task,
            method,
            setting,
            int(seed),
            overrides,
            overrides.get("trainer", "STPPOTrainer"),
            row,
            evaluation=evaluation,
        )


for convert in (rivals, solved, start, relay, guide):
    found = list(convert())
    keys = {(r["study"], r["task"], r["arm"], r["setting"], r["seed"]) for r in found}
    assert len(keys) == len(found), (convert.__name__, len(keys), len(found))
    text = "".join(json.dumps(r, separators=(",", ":")) + "\n" for r in found).encode()
    path = NEW / f"{convert.__name__}.jsonl.gz"
    path.write_bytes(gzip.compress(text, 9, mtime=0))
    print(path, len(found), path.stat().st_size)
