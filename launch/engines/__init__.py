"""Engines: where the processes of a run are started, and how the supervisor reaches them."""
