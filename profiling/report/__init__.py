"""`penstock profile`: a run, watched over a window of it, and what it leaves to look at."""
