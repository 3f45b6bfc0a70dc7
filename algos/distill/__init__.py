"""Distillation: a student learns to decide as trained policies do, on what it plays itself."""
