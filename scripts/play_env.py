r"""Play an environment in the terminal: `trl-stppo env play`.

python scripts/play_env.py
python scripts/play_env.py --environment trl_stppo.envs.adapters:FrozenLakeEnv \
        --environment_kwargs '{"is_slippery": false}' --row '{"prompt": "Cross the lake.\n\n"}'
"""

import sys

from trl_stppo.cli import run_here

if __name__ == "__main__":
    sys.exit(run_here("env play", sys.argv[1:]))
