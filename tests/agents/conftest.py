"""What the tests of frameworks share: the taught model of the example scripts."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts" / "agents"))
