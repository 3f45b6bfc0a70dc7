"""The errors of a replay buffer that a user can correct."""

from penstock.configs.errors import UserError


class ReplayError(UserError, ValueError):
    """A user's mistake: one sentence with the value, the rule and the next step."""


class DamagedSnapshotError(ReplayError):
    """The snapshot is damaged or incomplete, or the folder holds none."""
