"""Adapters for training and generating frameworks, each registered through the public door."""
