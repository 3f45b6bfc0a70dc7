"""The registry of gradient codecs: what a config needs of each, and how a learner makes one.

A new codec goes into `learner/extras/codecs/`, with its spec in the registry there. Only one
that most runs would use belongs here; the core never imports `learner.extras`.

Imports no torch, so that configs can be validated with it. Documentation and messages list codecs
in the order of registration: those here, then those of `learner.extras.codecs`.
"""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from penstock.configs.reduce import CODECS as CODECS
from penstock.configs.reduce import CodecSpec

if TYPE_CHECKING:
    from penstock.core.interfaces import Codec, CodecContext, CodecFactory


def make_codec(context: CodecContext) -> Codec:
    """Make the codec named by ``context.cfg.codec``.

    Raises:
        ValueError: for ``auto``, which must be resolved before, and for any other unknown name.
    """
    name = context.cfg.codec
    if name not in CODECS.specs:
        raise ValueError(f"codec {name!r} is not one of {sorted(CODECS.specs)}")
    factory: CodecFactory = resolve_name(CODECS.specs[name].entry_point)
    return factory(context)


_ROOM = "penstock.learner.codecs"
for _spec in (
    CodecSpec("none", "as they are (fp32)", f"{_ROOM}.rounding:Fp32", loss="none"),
    CodecSpec("fp16", "in half", f"{_ROOM}.rounding:Fp16", loss="rounding"),
    CodecSpec("bf16", "in half", f"{_ROOM}.rounding:Bf16", loss="rounding"),
    CodecSpec("int8", "in blocks", f"{_ROOM}.int8:Int8", loss="rounding"),
):
    CODECS.register(_spec)
