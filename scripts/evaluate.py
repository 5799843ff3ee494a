r"""Evaluate agents on held-out rows: `trl-stppo evaluate`.

python scripts/evaluate.py --config scripts/configs/demo.yaml --output runs/demo/table.json
accelerate launch scripts/evaluate.py --config my_run.yaml \
        --models Qwen/Qwen2.5-7B-Instruct runs/ppo runs/st-ppo
"""

import sys

from trl_stppo.cli import main

if __name__ == "__main__":
    sys.exit(main(["evaluate", *sys.argv[1:]]))
