"""Hypothesis: the same examples in every run, unless a search is asked for with `--hypothesis-profile search`."""

from hypothesis import HealthCheck, settings

settings.register_profile("ci", derandomize=True, deadline=None)
settings.register_profile(
    "search", max_examples=2000, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("ci")
