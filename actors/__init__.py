"""Actors: they play environments with the newest weights and record unrolls into slots."""
