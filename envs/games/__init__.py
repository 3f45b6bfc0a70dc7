"""Environments of Penstock's own, and gymnasium forms of games that have none."""
