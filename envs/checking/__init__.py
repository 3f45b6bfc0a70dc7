"""What can be wrong with an environment, found by playing it."""
