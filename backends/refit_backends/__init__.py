"""Transports and fabrics that come with refit_sdk, each registered through the public door."""
