"""Checks of an environment, made by playing it."""
