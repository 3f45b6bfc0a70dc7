"""The stages of `benchmarks/gpu.py`, a file each, and what they share."""
