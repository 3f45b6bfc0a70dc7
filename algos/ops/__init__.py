"""Maths shared by algorithms, as pure functions."""
