"""`penstock tune`: many runs with options from a space, by Ray Tune or without it."""
