"""Leagues: whom a policy plays against, and what results say of strength. Pure functions."""
