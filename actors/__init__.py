"""Actors: they play games with the newest weights and record unrolls into slots."""
