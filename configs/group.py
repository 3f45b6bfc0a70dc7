"""Checks of combinations of options for several learners."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.configs.reduce import CODECS
from penstock.configs.section import Contradiction
from penstock.configs.sections import LearnerConfig, Sections
from penstock.configs.transports import TRANSPORTS
from penstock.configs.value_types import either

SERVED = ("ssp", "asp", "tap", "backup")  # paces with a parameter server


def group(cfg: Sections) -> Iterator[Contradiction]:
    """Combinations of codecs, optimizers, paces and numbers of learners."""
    yield from codec_contradictions(cfg.learner)
    yield from _updates(cfg.learner)
    yield from _pace(cfg)
    yield from _statistics(cfg)
    yield from _numbers(cfg)


def codec_contradictions(learner: LearnerConfig) -> Iterator[Contradiction]:
    """Combinations of the codec with the optimizer and the pace."""
    codec, optimizer = learner.reduce.codec, learner.optimizer
    spec = CODECS.specs.get(codec)
    if spec and optimizer in spec.unfit:
        yield Contradiction(
            ("learner.reduce.codec", "learner.optimizer"),
            f"learner.reduce.codec {codec} {spec.unfit[optimizer]}",
        )
    if spec and spec.reduces_gradients and not spec.reduces_gradients(learner.reduce, 0):
        yield Contradiction(
            ("learner.reduce.codec", "learner.reduce.warmup_updates"),
            f"learner.reduce.codec {codec} divides by the variance of the gradients of its "
            "warm-up, and learner.reduce.warmup_updates is 0; set it to 1 or more",
        )
    paces = spec.paces if spec else ("bsp",)
    if learner.pace not in paces:
        yield Contradiction(
            ("learner.reduce.codec", "learner.pace"),
            f"learner.reduce.codec {codec} codes gradients with learner.pace {either(paces)} only, "
            f"and learner.pace is {learner.pace}; set learner.pace=bsp or "
            "learner.reduce.codec=none",
        )


def _updates(learner: LearnerConfig) -> Iterator[Contradiction]:
    if learner.accumulate > 1 and learner.updates_per_batch > 1:
        yield Contradiction(
            ("learner.accumulate", "learner.updates_per_batch"),
            f"learner.accumulate {learner.accumulate} makes one update from several batches, and "
            f"learner.updates_per_batch {learner.updates_per_batch} several updates from one; set "
            "one of them to 1",
        )
    if learner.weight_decay and learner.optimizer in ("adam", "rmsprop"):
        yield Contradiction(
            ("learner.weight_decay", "learner.optimizer"),
            f"learner.weight_decay {learner.weight_decay:g} is for sgd, lars and lamb, and "
            f"learner.optimizer is {learner.optimizer}; set learner.weight_decay=0",
        )
    if learner.lr_scaling != "none" and learner.most_count == 1:
        yield Contradiction(
            ("learner.lr_scaling", "learner.count"),
            f"learner.lr_scaling {learner.lr_scaling} has no effect while learner.count is 1; set "
            "learner.lr_scaling=none",
        )


def _pace(cfg: Sections) -> Iterator[Contradiction]:
    learner = cfg.learner
    pace = learner.pace
    yield from _parameter_server(learner)
    yield from _pull(learner)
    if pace in ("ssp", "asp", "tap") and learner.lr_scaling != "none":
        yield Contradiction(
            ("learner.lr_scaling", "learner.pace"),
            f"learner.lr_scaling {learner.lr_scaling} is for steps that all learners take "
            f"together, and with learner.pace {pace} each takes its own; set "
            "learner.lr_scaling=none",
        )
    yield from _accumulate(cfg)
    if pace != "bsp" and cfg.algo.trains_on != "unrolls":
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
    if pace == "backup" and learner.spare >= learner.most_count > 1:
        yield Contradiction(
            ("learner.spare", "learner.count"),
            f"learner.spare {learner.spare} is not below learner.count {learner.count}, so no "
            f"gradient would be used; set learner.spare={learner.most_count - 1} or less",
        )


def _parameter_server(learner: LearnerConfig) -> Iterator[Contradiction]:
    pace = learner.pace
    if pace in SERVED and learner.optimizer in ("lars", "lamb"):
        yield Contradiction(
            ("learner.pace", "learner.optimizer"),
            f"learner.pace {pace} uses a parameter server, which stores parameters without layers, "
            f"and learner.optimizer {learner.optimizer} works by layers; set "
            "learner.optimizer=sgd or learner.pace=bsp",
        )
    shards = learner.server_shards
    if shards > 1 and pace == "backup":
        yield Contradiction(
            ("learner.server_shards", "learner.pace"),
            f"learner.server_shards {shards} would each take the first gradients of a step that "
            "they receive, and with learner.pace backup drop others; set learner.server_shards=1 "
            "or learner.pace=ssp",
        )
    if learner.server_spread and pace not in SERVED:
        yield Contradiction(
            ("learner.server_spread", "learner.pace"),
            "learner.server_spread true places a parameter server, and learner.pace "
            f"{pace} has none; set learner.server_spread=false or learner.pace=ssp",
        )
    if shards > 1 and pace not in SERVED:
        yield Contradiction(
            ("learner.server_shards", "learner.pace"),
            f"learner.server_shards {shards} divides a parameter server, and learner.pace {pace} "
            "has none; set learner.server_shards=1 or learner.pace=ssp",
        )


def _accumulate(cfg: Sections) -> Iterator[Contradiction]:
    learner = cfg.learner
    pace = learner.pace
    if pace in SERVED and learner.accumulate > 1:
        yield Contradiction(
            ("learner.accumulate", "learner.pace"),
            f"learner.accumulate {learner.accumulate} adds up gradients of the same parameters, "
            f"and learner.pace {pace} trains each batch on the newest ones of its server; set "
            "learner.accumulate=1 or learner.pace=bsp",
        )
    if learner.accumulate > 1 and cfg.algo.trains_on != "unrolls":
        yield Contradiction(
            ("learner.accumulate", "algo.name"),
            f"learner.accumulate {learner.accumulate} is for algorithms without replay, and "
            f"algo.name is {cfg.algo.name}; set learner.accumulate=1, and a larger "
            "replay.batch_size",
        )
    if learner.accumulate > 1 and cfg.algo.passes > 1:
        yield Contradiction(
            ("learner.accumulate", "algo.epochs"),
            f"learner.accumulate {learner.accumulate} makes one update from several batches, and "
            f"algo.epochs {cfg.algo.passes} several updates from one; set one of them to 1",
        )


def _pull(learner: LearnerConfig) -> Iterator[Contradiction]:
    pull, pace = learner.pull, learner.pace
    if pull == "newest":
        return
    paces = ("ssp", "tap") if pull == "ahead" else ("ssp",)
    if pace not in paces:
        yield Contradiction(
            ("learner.pull", "learner.pace"),
            f"learner.pull {pull} is for learner.pace {either(paces)}, and learner.pace is {pace}; "
            f"set learner.pull=newest or learner.pace={paces[0]}",
        )
    elif pace == "ssp" and not learner.staleness:
        yield Contradiction(
            ("learner.pull", "learner.staleness"),
            f"learner.pull {pull} uses parameters without the learner's last gradient, and "
            "learner.staleness 0 allows none to be missing; set learner.pull=newest or "
            "learner.staleness=1 or more",
        )


def _statistics(cfg: Sections) -> Iterator[Contradiction]:
    """Learners must share the statistics that their inputs are normalised by."""
    pace = cfg.learner.pace
    if pace == "bsp" or cfg.learner.most_count == 1:
        return
    for key, wanted in (
        ("model.normalize_observations", cfg.model.normalize_observations),
        ("algo.normalize_rewards", cfg.algo.normalizes_rewards),
    ):
        if wanted:
            yield Contradiction(
                (key, "learner.pace"),
                f"{key} true needs statistics over the samples of all learners, which learner.pace "
                f"{pace} does not share; set learner.pace=bsp or {key}=false",
            )


def _numbers(cfg: Sections) -> Iterator[Contradiction]:
    count, most = cfg.learner.count, cfg.learner.most_count
    if isinstance(count, str) and cfg.learner.pace in SERVED:
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
            f"learner.count {count} needs an actor for each learner, and actors.count is "
            f"{cfg.first_actors}; set actors.count={most} or more",
        )
