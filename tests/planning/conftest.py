"""What the planning tests share is in `planning_support`; it is imported by name."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
