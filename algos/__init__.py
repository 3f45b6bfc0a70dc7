"""Algorithms: one folder each, with config, columns, exploration and update; what they share.

`registry` names them all, without importing torch or numpy.
"""
