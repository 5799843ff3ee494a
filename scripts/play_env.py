r"""Play an environment in the terminal: `trl-stppo env play`, without a --config the demo's.

python scripts/play_env.py
python scripts/play_env.py --environment trl_stppo.envs.adapters:GemEnv \
        --environment_kwargs '{"env_id": "game:Sokoban-v0-easy"}' --row '{"prompt": ""}'
"""

import sys

from trl_stppo.cli import run_here

DEMO = ["--environment", "trl_stppo.recipes.search:StdlibSearchEnv"]

if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(run_here("env play", words if "--config" in words else [*DEMO, *words]))
