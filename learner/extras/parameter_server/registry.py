"""The paces with a parameter server, for the config: what it needs of each.

Imports neither torch nor zmq, so that configs can be validated with it.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.configs.learner import PACES, LearnerConfig, PaceSpec
from penstock.configs.section import Contradiction

ROLE = "penstock.learner.extras.parameter_server.server:run"
_ENTRY_POINT = "penstock.learner.extras.parameter_server.pace:ServedPace"


def _alone(learner: LearnerConfig) -> Iterator[Contradiction]:
    """Yields what contradicts a pace by which each learner's gradient is an update of its own."""
    if learner.lr_scaling != "none":
        yield Contradiction(
            ("learner.lr_scaling", "learner.pace"),
            f"learner.lr_scaling {learner.lr_scaling} is for steps that all learners take "
            f"together, and with learner.pace {learner.pace} each takes its own; set "
            "learner.lr_scaling=none",
        )


def _ssp(learner: LearnerConfig) -> Iterator[Contradiction]:
    """Yields what contradicts the pace ssp."""
    yield from _alone(learner)
    if learner.pull != "newest" and not learner.staleness:
        yield Contradiction(
            ("learner.pull", "learner.staleness"),
            f"learner.pull {learner.pull} uses parameters without the learner's last gradient, and "
            "learner.staleness 0 allows none to be missing; set learner.pull=newest or "
            "learner.staleness=1 or more",
        )


def _backup(learner: LearnerConfig) -> Iterator[Contradiction]:
    """Yields what contradicts the pace backup."""
    if learner.spare >= learner.most_count > 1:
        yield Contradiction(
            ("learner.spare", "learner.count"),
            f"learner.spare {learner.spare} is not below learner.count {learner.count}, so no "
            f"gradient would be used; set learner.spare={learner.most_count - 1} or less",
        )
    if learner.server_shards > 1:
        yield Contradiction(
            ("learner.server_shards", "learner.pace"),
            f"learner.server_shards {learner.server_shards} would each take the first gradients of "
            "a step that they receive, and with learner.pace backup drop others; set "
            "learner.server_shards=1 or learner.pace=ssp",
        )


for _spec in (
    PaceSpec(
        "ssp",
        "lets a learner be at most `staleness` steps ahead of the slowest",
        _ENTRY_POINT,
        server=ROLE,
        codecs=("none", "bf16"),
        pulls=("newest", "ahead", "cached"),
        check=_ssp,
    ),
    PaceSpec(
        "asp",
        "sends only parameters that changed by more than `significance`",
        _ENTRY_POINT,
        server=ROLE,
        check=_alone,
    ),
    PaceSpec(
        "tap",
        "never waits",
        _ENTRY_POINT,
        server=ROLE,
        codecs=("none", "bf16"),
        pulls=("newest", "ahead"),
        check=_alone,
    ),
    PaceSpec(
        "backup",
        "drops the last `spare` gradients of each step",
        _ENTRY_POINT,
        server=ROLE,
        codecs=("none", "bf16"),
        check=_backup,
    ),
):
    PACES.register(_spec)
