"""Measuring: what each process is doing, and where its time goes."""
