"""What adding a codec takes: one class and one registration, both in this file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from penstock.autotune.codec import candidates
from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.configs.reduce import CODECS, CodecSpec, ReduceConfig
from penstock.configs.reference import reference
from penstock.configs.sections import LearnerConfig
from penstock.core.interfaces import Bucket, CodecContext, CodecFactory, Collective
from penstock.learner.codecs.buckets import bucket_nbytes, buckets_of
from penstock.learner.codecs.collective import all_reduce_nbytes
from penstock.learner.codecs.rounding import Fp32
from reduce_ring import Floats, codec_for, gradients, reduce_all, run_ranks

FOUR = ("learner.count=4", "actors.count=4", "learner.optimizer=sgd")


class Grid:
    """Rounds to multiples of ``learner.reduce.density``."""

    def __init__(self, context: CodecContext) -> None:
        self.buckets = buckets_of(
            context.parts, bucket_nbytes(context.cfg.bucket_mb, context.device)
        )
        self._step = context.cfg.density
        self._world = context.world

    def begin(self, update: int) -> None:
        pass

    def reduce(self, bucket: Bucket, grads: Tensor, ring: Collective) -> None:
        grads.div_(self._step).round_().mul_(self._step)
        ring.all_reduce(grads)

    def nbytes(self, update: int) -> int:
        return sum(all_reduce_nbytes(4 * bucket.size, self._world) for bucket in self.buckets)

    def residuals(self) -> Mapping[str, Tensor]:
        return {}

    def reset(self) -> None:
        pass


SPEC = CodecSpec(
    "grid",
    "as multiples of a number",
    f"{__name__}:Grid",
    loss="rounding",
    tried_by_auto=False,
    ruins_variance="multiples of a number",
)
FACTORIES: tuple[CodecFactory, ...] = (Grid, Fp32)  # held against the Protocol by mypy


@pytest.fixture
def registered() -> Iterator[None]:
    CODECS.register(SPEC)
    yield
    CODECS.unregister(SPEC.name)


def chosen(*more: str) -> ReduceConfig:
    return resolve("cartpole", [*FOUR, "learner.reduce.codec=grid", *more]).learner.reduce


@pytest.mark.usefixtures("registered")
def test_config_accepts_the_new_codec(tmp_path: Any) -> None:
    cfg = resolve("cartpole", [*FOUR, "learner.reduce.codec=grid"])
    (tmp_path / "again.yaml").write_text(dump(cfg))
    assert resolve(str(tmp_path / "again.yaml")) == cfg


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learner.optimizer=adam", r"codec grid sends multiples of a number, which ruins the"),
        ("learner.pace=local_sgd", r"learner\.reduce\.codec grid codes gradients with"),
        ("learner.reduce.codec=gird", r" or 'grid'; the default is 'none'"),
    ],
)
def test_invalid_options_of_the_new_codec_are_refused_with_a_reason(
    override: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        chosen(override)


@pytest.mark.usefixtures("registered")
def test_reference_page_lists_the_new_codec() -> None:
    assert ", `grid` as multiples of a number." in reference()


@pytest.mark.usefixtures("registered")
def test_two_ranks_reduce_with_the_new_codec() -> None:
    grads = 10 * gradients(2, 1)[0]

    def work(ring: Collective) -> Floats:
        codec = codec_for(2, ring.rank, codec="grid", density=0.25)
        return reduce_all(codec, ring, 0, grads[ring.rank])

    for found in run_ranks(2, work):
        assert found.any()
        np.testing.assert_array_equal(found, (np.round(grads * 4) / 4).sum(0))


@pytest.mark.usefixtures("registered")
def test_auto_does_not_try_a_codec_that_opts_out() -> None:
    assert "grid" not in candidates(LearnerConfig(count=2, optimizer="sgd"))


def test_unregistered_codec_is_unknown_again() -> None:
    before = tuple(CODECS.specs)
    CODECS.register(SPEC)
    CODECS.unregister("grid")
    assert tuple(CODECS.specs) == before
    with pytest.raises(UserError, match=r"codec is 'grid'; it must be 'none', 'auto', 'fp16'"):
        chosen()
    assert "grid" not in reference()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (CodecSpec("int8", "", ""), "codec int8 exists already"),
        (CodecSpec("auto", "", ""), "codec auto exists already"),
    ],
)
def test_registering_a_codec_name_twice_is_refused(spec: CodecSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CODECS.register(spec)


def test_every_registered_codec_can_be_constructed() -> None:
    for name in CODECS.specs:
        codec = codec_for(2, 0, codec=name)
        assert codec.buckets
        assert codec.nbytes(0) > 0
        assert all(values.dtype == torch.float32 for values in codec.residuals().values())
