"""Makes `moving_support` and `moving_cases` importable here and in the processes that tests start."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "gpu")]
