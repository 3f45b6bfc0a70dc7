"""How a run is seen: metrics and where they go, the live view, status, stacks, plots, summaries."""
