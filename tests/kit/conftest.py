"""Makes the helpers here importable in the processes that the kit starts."""

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent), str(Path(__file__).parents[1] / "gpu")]
