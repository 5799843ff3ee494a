r"""Evaluate agents on held-out rows: `trl-stppo evaluate`, in this process.

python scripts/evaluate.py --config scripts/configs/demo.yaml --output runs/demo/table
accelerate launch scripts/evaluate.py --config my_run.yaml \
        --models Qwen/Qwen2.5-7B-Instruct runs/ppo runs/st-ppo --labels base PPO ST-PPO
"""

import sys

from trl_stppo.cli import run_here

if __name__ == "__main__":
    sys.exit(run_here("evaluate", sys.argv[1:]))
