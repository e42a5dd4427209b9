"""Makes `moving_support` and `moving_cases` importable here and in the processes that tests start."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
