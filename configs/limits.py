"""Limits that options and transports share. Imports nothing."""

MOST_CHAIRS = 64
"""Opponents' policies of a run: each is a descriptor in every actor's process."""
