"""Run the console script with `python -m trl_stppo`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
