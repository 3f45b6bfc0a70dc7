"""The error of a replay buffer that is the user's to mend."""

from penstock.configs.errors import UserError


class ReplayError(UserError, ValueError):
    """One sentence with the value, the rule and the next step."""
