"""Plug-ins of every kind from a distribution of its own: small, working, and held to the conformance kit."""
