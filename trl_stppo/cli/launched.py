"""What the launcher's processes run: `python -m trl_stppo.cli.launched train --config ...`."""

import sys

from trl_stppo.cli.main import run_here

if __name__ == "__main__":
    sys.exit(run_here(sys.argv[1], sys.argv[2:]))
