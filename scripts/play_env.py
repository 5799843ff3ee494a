r"""Play an environment in the terminal: `trl-stppo env play`, without words the demo's.

python scripts/play_env.py
python scripts/play_env.py trl_stppo.envs.adapters:GemEnv \
        --arguments '{"env_id": "game:Sokoban-v0-easy"}' --row '{"prompt": ""}'
"""

import sys

from trl_stppo.cli import main

DEMO = ["scripts.search.search_env:StdlibSearchEnv"]

if __name__ == "__main__":
    sys.exit(main(["env", "play", *(sys.argv[1:] or DEMO)]))
