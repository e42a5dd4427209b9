"""refit_sdk: move a policy's new weights from the ranks that train it to the ranks that generate with it."""

__version__ = "0.1.0"
