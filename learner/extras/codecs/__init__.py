"""Lossy gradient codecs: they add variance, or delay values, so `codec: auto` never takes one."""
