"""Checks of combinations of options for several learners.

Each `_check_...` yields the invalid combinations of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.configs.learner import OPTIMIZERS, PACES, LearnerConfig, OptimizerSpec
from penstock.configs.reduce import CODECS, CodecSpec
from penstock.configs.section import Contradiction
from penstock.configs.sections import Sections
from penstock.configs.transports import TRANSPORTS
from penstock.configs.value_types import either

FITS_ALL = "int8"
"""A codec that goes with every optimizer, for messages."""


def check_group(cfg: Sections) -> Iterator[Contradiction]:
    """Yields invalid combinations of codecs, optimizers, paces and numbers of learners."""
    yield from codec_contradictions(cfg.learner)
    yield from _check_optimizer(cfg.learner)
    yield from _check_updates(cfg.learner)
    yield from _check_pace(cfg)
    yield from _check_statistics(cfg)
    yield from _check_learners(cfg)


def codec_contradictions(learner: LearnerConfig) -> Iterator[Contradiction]:
    """Yields invalid combinations of the codec with the optimizer and the pace."""
    name = learner.reduce.codec
    codec = CODECS.specs.get(name)  # None for `auto`
    optimizer = OPTIMIZERS.specs[learner.optimizer]

    if codec and not goes_with(codec, optimizer):
        yield Contradiction(
            ("learner.reduce.codec", "learner.optimizer"),
            f"learner.reduce.codec {name} {_misfit(codec, optimizer)}",
        )

    # A codec that sends momentum needs at least one update in which the variance is measured.
    if codec and codec.reduces_gradients and not codec.reduces_gradients(learner.reduce, 0):
        yield Contradiction(
            ("learner.reduce.codec", "learner.reduce.warmup_updates"),
            f"learner.reduce.codec {name} divides by the variance of the gradients of its "
            "warm-up, and learner.reduce.warmup_updates is 0; set it to 1 or more",
        )

    paces = PACES.using_codec(name)
    if learner.pace not in paces:
        yield Contradiction(
            ("learner.reduce.codec", "learner.pace"),
            f"learner.reduce.codec {name} codes gradients with learner.pace {either(paces)} only, "
            f"and learner.pace is {learner.pace}; set learner.pace=bsp or "
            "learner.reduce.codec=none",
        )


def goes_with(codec: CodecSpec, optimizer: OptimizerSpec) -> bool:
    """Whether an optimizer can step by what a codec sends."""
    if codec.reduces_gradients is not None:
        return bool(optimizer.frozen_variance) and optimizer.scales_layers == codec.scales_layers

    variance_is_ruined = bool(codec.ruins_variance) and optimizer.divides_by_variance
    momentum_is_replaced = codec.own_momentum and not optimizer.leaves_momentum
    return not (variance_is_ruined or momentum_is_replaced)


def _misfit(codec: CodecSpec, optimizer: OptimizerSpec) -> str:
    """Returns why a codec and an optimizer do not go together, and what to set.

    It is the end of a sentence that begins with the codec.
    """
    fitting = [spec for spec in OPTIMIZERS.specs.values() if goes_with(codec, spec)]
    if codec.reduces_gradients is not None:
        whose = fitting[0].long_name if fitting else "another optimizer"
        why = (
            f"sends the momentum of {whose}, divided by the root of its variance, and "
            f"learner.optimizer is {optimizer.name}"
        )
    elif codec.ruins_variance and optimizer.divides_by_variance:
        why = (
            f"sends {codec.ruins_variance}, which ruins the second moment that learner.optimizer "
            f"{optimizer.name} divides by"
        )
    else:
        why = (
            "has its own momentum in place of the optimizer's, and learner.optimizer "
            f"{optimizer.name} cannot do without"
        )

    # Other codecs, or another optimizer, if one goes with the codec.
    senders = [spec for spec in CODECS.specs.values() if spec.reduces_gradients is not None]
    codecs = [spec.name for spec in senders if goes_with(spec, optimizer)]
    remedy = f"learner.reduce.codec={either([*codecs, FITS_ALL])}"
    if fitting:
        other = fitting[0]
        has_other_scale = optimizer.divides_by_variance and not other.divides_by_variance
        rate = " (with a learning rate of its own)" if has_other_scale else ""
        remedy = f"learner.optimizer={other.name}{rate}, or {remedy}"
    return f"{why}; set {remedy}"


def _check_optimizer(learner: LearnerConfig) -> Iterator[Contradiction]:
    """Check that the optimizer decays weights if that is wanted."""
    optimizer = learner.optimizer
    decaying = OPTIMIZERS.using("weight_decay")
    if learner.weight_decay and optimizer not in decaying:
        *most, last = decaying
        yield Contradiction(
            ("learner.weight_decay", "learner.optimizer"),
            f"learner.weight_decay {learner.weight_decay:g} is for {', '.join(most)} and {last}, "
            f"and learner.optimizer is {optimizer}; set learner.weight_decay=0",
        )


def _check_updates(learner: LearnerConfig) -> Iterator[Contradiction]:
    """Check the options by which batches become updates."""
    if learner.accumulate > 1 and learner.updates_per_batch > 1:
        yield Contradiction(
            ("learner.accumulate", "learner.updates_per_batch"),
            f"learner.accumulate {learner.accumulate} makes one update from several batches, and "
            f"learner.updates_per_batch {learner.updates_per_batch} several updates from one; set "
            "one of them to 1",
        )

    if learner.lr_scaling != "none" and learner.most_count == 1:
        yield Contradiction(
            ("learner.lr_scaling", "learner.count"),
            f"learner.lr_scaling {learner.lr_scaling} has no effect while learner.count is 1; set "
            "learner.lr_scaling=none",
        )


def _check_pace(cfg: Sections) -> Iterator[Contradiction]:
    """Check the pace of several learners with the options that it uses."""
    learner = cfg.learner
    pace = learner.pace
    spec = PACES.specs[pace]
    yield from _check_parameter_server(learner)
    yield from _check_pull(learner)
    yield from spec.check(learner)
    yield from _check_accumulation(cfg)

    if not spec.sums_gradients and cfg.algo.trains_on != "unrolls":
        yield Contradiction(
            ("learner.pace", "algo.name"),
            f"learner.pace {pace} is for algorithms without replay, and algo.name is "
            f"{cfg.algo.name}; set learner.pace=bsp",
        )
    if pace != "bsp" and learner.most_count == 1:
        yield Contradiction(
            ("learner.pace", "learner.count"),
            f"learner.pace {pace} is for several learners, and learner.count is 1; set "
            "learner.count=2 or more, or learner.pace=bsp",
        )


def _check_parameter_server(learner: LearnerConfig) -> Iterator[Contradiction]:
    """Check the optimizer with a parameter server, and options that need a parameter server."""
    pace = learner.pace
    shards = learner.server_shards
    if learner.served and not OPTIMIZERS.specs[learner.optimizer].is_elementwise:
        yield Contradiction(
            ("learner.pace", "learner.optimizer"),
            f"learner.pace {pace} uses a parameter server, which stores parameters without layers, "
            f"and learner.optimizer {learner.optimizer} works by layers; set "
            "learner.optimizer=sgd or learner.pace=bsp",
        )

    if learner.server_spread and not learner.served:
        yield Contradiction(
            ("learner.server_spread", "learner.pace"),
            "learner.server_spread true places a parameter server, and learner.pace "
            f"{pace} has none; set learner.server_spread=false or learner.pace=ssp",
        )
    if shards > 1 and not learner.served:
        yield Contradiction(
            ("learner.server_shards", "learner.pace"),
            f"learner.server_shards {shards} divides a parameter server, and learner.pace {pace} "
            "has none; set learner.server_shards=1 or learner.pace=ssp",
        )


def _check_accumulation(cfg: Sections) -> Iterator[Contradiction]:
    """Check that gradients of several batches can be added up for one update."""
    learner = cfg.learner
    if learner.accumulate == 1:
        return

    if learner.served:
        yield Contradiction(
            ("learner.accumulate", "learner.pace"),
            f"learner.accumulate {learner.accumulate} adds up gradients of the same parameters, "
            f"and learner.pace {learner.pace} trains each batch on the newest ones of its server; "
            "set learner.accumulate=1 or learner.pace=bsp",
        )
    if cfg.algo.trains_on != "unrolls":
        yield Contradiction(
            ("learner.accumulate", "algo.name"),
            f"learner.accumulate {learner.accumulate} is for algorithms without replay, and "
            f"algo.name is {cfg.algo.name}; set learner.accumulate=1, and a larger "
            "replay.batch_size",
        )
    if cfg.algo.passes > 1:
        yield Contradiction(
            ("learner.accumulate", "algo.epochs"),
            f"learner.accumulate {learner.accumulate} makes one update from several batches, and "
            f"algo.epochs {cfg.algo.passes} several updates from one; set one of them to 1",
        )


def _check_pull(learner: LearnerConfig) -> Iterator[Contradiction]:
    """Check that the pace can fetch parameters at the time that `learner.pull` names."""
    pull = learner.pull
    pace = learner.pace
    paces = [name for name, spec in PACES.specs.items() if pull in spec.pulls]
    if pace not in paces:
        yield Contradiction(
            ("learner.pull", "learner.pace"),
            f"learner.pull {pull} is for learner.pace {either(paces)}, and learner.pace is {pace}; "
            f"set learner.pull=newest or learner.pace={paces[0]}",
        )


def _check_statistics(cfg: Sections) -> Iterator[Contradiction]:
    """Check that learners share the statistics by which their inputs are normalised."""
    pace = cfg.learner.pace
    if PACES.specs[pace].sums_gradients or cfg.learner.most_count == 1:
        return

    options = {
        "model.normalize_observations": cfg.model.normalize_observations,
        "algo.normalize_rewards": cfg.algo.normalizes_rewards,
    }
    for option, normalizes in options.items():
        if normalizes:
            yield Contradiction(
                (option, "learner.pace"),
                f"{option} true needs statistics over the samples of all learners, which "
                f"learner.pace {pace} does not share; set learner.pace=bsp or {option}=false",
            )


def _check_learners(cfg: Sections) -> Iterator[Contradiction]:
    """Check the number of learners with the pace, the transport and the number of actors."""
    count = cfg.learner.count
    most = cfg.learner.most_count
    if isinstance(count, str) and cfg.learner.served:
        yield Contradiction(
            ("learner.count", "learner.pace"),
            f"learner.count {count} changes the number of learners, and a parameter server of "
            f"learner.pace {cfg.learner.pace} has a fixed one; set learner.pace=bsp, or "
            f"learner.count={most}",
        )
    if most == 1:
        return

    if TRANSPORTS.one_process(cfg.transport.kind):
        yield Contradiction(
            ("learner.count", "transport.kind"),
            f"learner.count {count} needs a process for each learner, and transport.kind "
            f"{cfg.transport.kind} is one process; set learner.count=1 or transport.kind=shm",
        )
    if cfg.first_actors < most and cfg.transport.bind is None:
        yield Contradiction(
            ("learner.count", "actors.count"),
            f"learner.count {count} needs actors.count {most} or more, one for each learner, and "
            f"it is {cfg.first_actors}; set actors.count={most} or more",
        )
