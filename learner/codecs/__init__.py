"""One gradient of several learners: cut in buckets, coded, and summed over them.

A codec is one class (`core.interfaces.Codec`), listed in `registry` and made by `make_codec` there.
It exchanges bytes with other learners through a `Collective` only. What came in as this rank's
share of the mean gradient leaves as the sum over ranks, bitwise the same on all of them.
"""
