"""Makes the harness importable here and in the processes that tests start."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent))
