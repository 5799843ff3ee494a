"""Train an agent: `trl-stppo train`, in this process.

accelerate launch scripts/train_stppo.py --config scripts/configs/demo.yaml
python scripts/train_stppo.py --config scripts/configs/demo.yaml --variant ppo --seed 1
python scripts/train_stppo.py --config my_run.yaml --dry_run --dry_run_processes 8
"""

import sys

from trl_stppo.cli import run_here

if __name__ == "__main__":
    sys.exit(run_here("train", sys.argv[1:]))
