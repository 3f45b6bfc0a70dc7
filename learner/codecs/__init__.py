"""Gradient codecs: one gradient of several learners is cut in buckets, coded and summed.

A codec is one class (`core.interfaces.Codec`), listed in `registry` and made by `make_codec` there.
It exchanges bytes with other learners only through a `Collective`. Its input is this rank's share
of the mean gradient, its output the sum over ranks, bitwise the same on all of them.
"""
