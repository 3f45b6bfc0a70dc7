"""Checkpoints: their format, which of them a run keeps, and how it resumes."""
