"""The errors of a replay buffer that are the user's to mend."""

from penstock.configs.errors import UserError


class ReplayError(UserError, ValueError):
    """One sentence with the value, the rule and the next step."""


class DamagedSnapshotError(ReplayError):
    """A snapshot that is not whole, or is none."""
