"""Adapters to other libraries, run by their own Python."""
