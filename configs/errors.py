"""The error that is the user's to mend."""


class UserError(Exception):
    """One sentence with the value, the rule and the next step; ends a command with exit code 2."""
