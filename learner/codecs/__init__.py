"""One gradient of several learners: cut in buckets, coded, and summed over them.

A *codec* is one class (`codec.Codec`); `make.make_codec` picks it. It talks to the other learners
through a `collective.Collective` only, which counts the bytes. What came in as this rank's share of
the mean gradient leaves as the sum over ranks, bitwise the same on all of them.
"""
