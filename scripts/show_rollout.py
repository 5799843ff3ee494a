"""Show the tokens of a few episodes: `trl-stppo show`, without a --config with the demo's first agent.

python scripts/show_rollout.py
python scripts/show_rollout.py --model_name_or_path runs/demo --index 3 --episodes 2 --logprobs
python scripts/show_rollout.py --environment my_module:MyEnv --row '{"prompt": "Go."}' --greedy
"""

import sys
from pathlib import Path

from trl_stppo.cli import run_here

AGENT = Path(__file__).parent / "assets" / "search-agent"
DEMO = ["--model_name_or_path", str(AGENT)]
DEMO += ["--environment", "trl_stppo.recipes.search:StdlibSearchEnv"]

if __name__ == "__main__":
    words = sys.argv[1:]
    sys.exit(run_here("show", words if "--config" in words else [*DEMO, *words]))
