"""Hypothesis: the same examples in every run, unless a search is asked for with `--hypothesis-profile search`.

And processes that tests start can import test modules by the names that pytest gives them, `tests.refit.test_push`. The
checkout comes last on the path, so that what is tested is what is installed.
"""

import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

sys.path.append(str(Path(__file__).parents[1]))

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile(
    "search", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ci")
