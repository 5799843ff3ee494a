"""Train an agent: `trl-stppo train`.

accelerate launch scripts/train_stppo.py --config scripts/configs/demo.yaml
python scripts/train_stppo.py --config scripts/configs/demo.yaml --variant ppo --seed 1
WORLD_SIZE=8 python scripts/train_stppo.py --config my_run.yaml --dry_run
"""

import sys

from trl_stppo.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
