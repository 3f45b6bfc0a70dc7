"""Checks of combinations of options; each invalid one is a sentence with a remedy.

Each `_check_...` yields the invalid combinations of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.configs.group import group
from penstock.configs.model import ModelConfig
from penstock.configs.policy_lag import lag_of, lent_by_batch, updates_of_batch
from penstock.configs.run import SINKS
from penstock.configs.schedules import LinearSchedule
from penstock.configs.section import Contradiction, Section
from penstock.configs.sections import Sections
from penstock.configs.transports import TRANSPORTS
from penstock.configs.value_types import is_local

LEAST_CONFIRMING = 10  # episodes that a confidence interval needs


def contradictions(cfg: Sections) -> list[Contradiction]:
    """Returns all invalid combinations in a config whose fields are each valid."""
    ends = (_lent_by_batch, _schedule, _stop, _evaluation, _store, _addresses, _keys, _sinks)
    of_learner = (_batches, _rewards, _replay, _gathering, _algo, _compile)
    checks = (*of_learner, _inference, *ends, network, group)
    return [found for check in checks for found in check(cfg)]


def _batches(cfg: Sections) -> Iterator[Contradiction]:
    if cfg.algo.trains_on != "unrolls":
        return
    envs, transport, learner = cfg.actor_envs, cfg.transport, cfg.learner
    if cfg.algo.by_steps(cfg.model.core != "none"):
        yield from _minibatches_of_steps(cfg)
    elif envs % learner.updates_per_batch:
        more = -(-envs // learner.updates_per_batch) * learner.updates_per_batch
        fewer = max(n for n in range(1, learner.updates_per_batch) if envs % n == 0)
        yield Contradiction(
            ("actors.envs", "learner.updates_per_batch"),
            f"actors.envs {envs} is not divisible by learner.updates_per_batch "
            f"{learner.updates_per_batch}, and each update takes an equal share of a slot's "
            f"environments; set actors.envs={more} or "
            f"learner.updates_per_batch={fewer}{_or_steps(cfg)}",
        )
    waiting = max(1, cfg.first_actors // learner.most_count) * transport.slots
    if waiting < learner.batch_slots:
        needed = -(-learner.batch_slots // transport.slots) * learner.most_count
        yield Contradiction(
            ("actors.count", "transport.slots", "learner.batch_slots"),
            f"learner.batch_slots {learner.batch_slots} is more than the {waiting} slots that "
            f"actors.count {_first(cfg)} and transport.slots {transport.slots} provide"
            f"{' for each learner' if learner.most_count > 1 else ''}; set "
            f"learner.batch_slots={waiting} or less, or actors.count={needed} or more",
        )
    least, updates = lag_of(cfg, learner.batch_slots), updates_of_batch(cfg)
    if least > transport.max_policy_lag and not lent_by_batch(cfg):
        less = "0 for the synchronous mode"
        if updates > 1:
            less = f"{updates - 1} or less to play a batch during the last steps of the one before"
        yield Contradiction(
            ("transport.max_policy_lag", "learner.prefetch", "learner.publish_every"),
            f"transport.max_policy_lag {transport.max_policy_lag} is below {least}, the lag that "
            "learner.prefetch and learner.publish_every make with the slots of a single batch; set "
            f"transport.max_policy_lag={least}, or {less}",
        )


def _first(cfg: Sections) -> str:
    """The value of `actors.count`, with the number with which a run starts where it may change."""
    count = cfg.actors.count
    return str(count) if isinstance(count, int) else f"{count} ({cfg.first_actors})"


def _minibatches_of_steps(cfg: Sections) -> Iterator[Contradiction]:
    updates, actors = cfg.learner.updates_per_batch, cfg.actors
    steps = cfg.actor_envs * actors.unroll * cfg.learner.batch_slots
    if updates > steps:
        yield Contradiction(
            ("learner.updates_per_batch", "actors.envs", "actors.unroll"),
            f"learner.updates_per_batch {updates} is more than the {steps} steps of a batch "
            "(actors.envs x actors.unroll x learner.batch_slots); set "
            f"learner.updates_per_batch={steps} or less",
        )

    if cfg.model.core != "none":
        yield Contradiction(
            ("algo.minibatches", "model.core"),
            f"algo.minibatches steps are in no order, and model.core {cfg.model.core} needs whole "
            "unrolls; set algo.minibatches=unrolls or model.core=none",
        )


def _or_steps(cfg: Sections) -> str:
    """Returns a third remedy, where minibatches may be of steps; otherwise an empty text."""
    possible = cfg.model.core == "none" and "minibatches" in type(cfg.algo).model_fields
    return ", or algo.minibatches=steps" if possible else ""


def _lent_by_batch(cfg: Sections) -> Iterator[Contradiction]:
    """Of a bound on lag with which slots are lent for one batch at a time."""
    lag, learner = cfg.transport.max_policy_lag, cfg.learner
    more = f"transport.max_policy_lag={max(1000, lag_of(cfg, learner.batch_slots))}"
    bound = f"transport.max_policy_lag {lag} makes actors wait for the weights of each batch"
    if lag == 0 and cfg.algo.trains_on != "unrolls":
        yield Contradiction(
            ("transport.max_policy_lag", "algo.name"),
            f"{bound}, and algo.name {cfg.algo.name} does not train on batches of fresh unrolls; "
            f"set {more}, and transport.kind=inproc to play and train in turns",
        )
    if not lent_by_batch(cfg):
        return

    if learner.most_count > 1:
        yield Contradiction(
            ("transport.max_policy_lag", "learner.count"),
            f"{bound}, and with learner.count {learner.count} a learner also continues "
            f"without a batch of its own; set learner.count=1 or {more}",
        )
    actors, batch = cfg.first_actors, learner.batch_slots
    whole = -(-batch // actors) * actors
    if TRANSPORTS.one_process(cfg.transport.kind) and batch % actors:
        yield Contradiction(
            ("transport.max_policy_lag", "transport.kind", "learner.batch_slots"),
            f"{bound}, and with transport.kind {cfg.transport.kind} each of actors.count "
            f"{_first(cfg)} plays one slot per turn, so learner.batch_slots {batch} must be a "
            f"multiple of that; set learner.batch_slots={whole}, actors.count=1 or {more}",
        )


def _rewards(cfg: Sections) -> Iterator[Contradiction]:
    algo = cfg.algo
    if algo.normalizes_rewards and algo.reward_clip is not None:
        yield Contradiction(
            ("algo.normalize_rewards", "algo.reward_clip"),
            f"algo.normalize_rewards needs unclipped rewards, and algo.reward_clip is "
            f"{algo.reward_clip:g}; set algo.reward_clip=null or algo.normalize_rewards=false",
        )

    if algo.normalizes_rewards and algo.reward_scale != 1:
        yield Contradiction(
            ("algo.normalize_rewards", "algo.reward_scale"),
            "algo.normalize_rewards scales rewards already, and algo.reward_scale is "
            f"{algo.reward_scale:g}; set algo.reward_scale=1 or algo.normalize_rewards=false",
        )


def _replay(cfg: Sections) -> Iterator[Contradiction]:
    replay = cfg.replay
    if cfg.algo.trains_on == "unrolls":
        defaults = type(replay)()
        keys = [key for key in type(replay).model_fields if _differ(key, replay, defaults)]
        if keys:
            custom = cfg.algo.name == "custom"
            name, other = ("data", "transitions") if custom else ("name", "dqn")
            yield Contradiction(
                (*(f"replay.{key}" for key in keys), f"algo.{name}"),
                f"replay.{keys[0]} has no effect with algo.{name} {getattr(cfg.algo, name)}, which "
                f"does not use replay; set algo.{name}={other}, or replay={{}}",
            )
        return
    half = replay.capacity // 2
    for key in ("min_size", "batch_size"):
        if (value := getattr(replay, key)) > half:
            fit = f"replay.{key}={half} or less" if half else f"replay.capacity={2 * value} or more"
            yield Contradiction(
                (f"replay.{key}", "replay.capacity"),
                f"replay.{key} {value} is more than half of replay.capacity {replay.capacity}, and "
                "each reset takes up the room of a step, so that with short episodes training "
                f"would never begin; set {fit}",
            )
    if TRANSPORTS.one_process(cfg.transport.kind) and replay.samples_per_insert is None:
        yield Contradiction(
            ("replay.samples_per_insert", "transport.kind"),
            "replay.samples_per_insert null sets no limit after which the actors take their turn "
            f"(transport.kind {cfg.transport.kind}); set replay.samples_per_insert=8",
        )
    needs_errors = {"prioritized": True, "uniform": False}.get(replay.sampler or "")
    if needs_errors is not None and needs_errors is not replay.prioritized:
        yield Contradiction(
            ("replay.sampler", "replay.prioritized"),
            f"replay.sampler {replay.sampler} {'draws' if needs_errors else 'does not draw'} by TD "
            f"errors, and replay.prioritized is {str(replay.prioritized).lower()}; set "
            f"replay.prioritized={str(needs_errors).lower()}, or replay.sampler=null",
        )

    if replay.prioritized and replay.beta == 1 and replay.beta_steps is not None:
        yield Contradiction(
            ("replay.beta", "replay.beta_steps"),
            f"replay.beta_steps {replay.beta_steps} has no effect while replay.beta is 1; set "
            "replay.beta=0.4 or replay.beta_steps=null",
        )


def _gathering(cfg: Sections) -> Iterator[Contradiction]:
    if cfg.algo.trains_on == "unrolls":
        return
    learner, defaults = cfg.learner, type(cfg.learner)()
    for key, does in (
        ("updates_per_batch", "trains once on each batch that it samples from replay"),
        ("gather_threads", "does not gather slots into batches"),
    ):
        if _differ(key, learner, defaults):
            default = getattr(defaults, key)
            yield Contradiction(
                (f"learner.{key}", "algo.name"),
                f"learner.{key} {getattr(learner, key)} has no effect with algo.name "
                f"{cfg.algo.name}, which {does}; set learner.{key}="
                f"{'null' if default is None else default}",
            )


def _algo(cfg: Sections) -> Iterator[Contradiction]:
    return cfg.algo.contradictions()


def _differ(key: str, a: Section, b: Section) -> bool:
    return bool(getattr(a, key) != getattr(b, key))


def _compile(cfg: Sections) -> Iterator[Contradiction]:
    if cfg.learner.compile and cfg.algo.trains_on != "unrolls":
        yield Contradiction(
            ("learner.compile", "algo.name"),
            f"learner.compile true does nothing for algo.name {cfg.algo.name}; set "
            "learner.compile=false",
        )


def _inference(cfg: Sections) -> Iterator[Contradiction]:
    if cfg.actors.inference != "numpy":
        return
    if cfg.actors.precision == "bf16":
        yield Contradiction(
            ("actors.inference", "actors.precision"),
            "actors.inference numpy does not support actors.precision bf16; "
            "set actors.inference=torch or actors.precision=fp32",
        )


def _schedule(cfg: Sections) -> Iterator[Contradiction]:
    keys = ("learner.lr_end_fraction", "learner.lr_decay_steps")
    fraction, steps = cfg.learner.lr_end_fraction, cfg.learner.lr_decay_steps
    if fraction != 1 and steps is None:
        yield Contradiction(
            keys,
            f"learner.lr_end_fraction {fraction:g} needs learner.lr_decay_steps, the agent steps "
            "over which the learning rate falls; set it, for example, to 1e6",
        )
    if fraction == 1 and steps is not None:
        yield Contradiction(
            keys,
            f"learner.lr_decay_steps {steps} has no effect while learner.lr_end_fraction is 1; "
            "set learner.lr_end_fraction=0 to decay to zero",
        )
    lr = cfg.learner.lr
    if isinstance(lr, LinearSchedule) and fraction != 1:
        yield Contradiction(
            ("learner.lr", *keys),
            f"learner.lr is a schedule from {lr.from_:g} to {lr.to:g}, and learner.lr_end_fraction "
            f"{fraction:g} would lower the rate too; set learner.lr={lr.from_:g}, or "
            "learner.lr_end_fraction=1 and learner.lr_decay_steps=null",
        )


def _stop(cfg: Sections) -> Iterator[Contradiction]:
    if cfg.stop.hold_s and cfg.stop.return_ is None:
        yield Contradiction(
            ("stop.hold_s",),
            f"stop.hold_s {cfg.stop.hold_s:g} counts from the moment when stop.return is reached, "
            "and stop.return is null; set stop.return, or stop.minutes for a time limit",
        )
    if 0 < (episodes := cfg.stop.confirm_episodes) < LEAST_CONFIRMING:
        yield Contradiction(
            ("stop.confirm_episodes",),
            f"stop.confirm_episodes {episodes} is too few to estimate the spread of returns; set "
            f"at least {LEAST_CONFIRMING}, or 0 to end the run by the return in training",
        )


def _evaluation(cfg: Sections) -> Iterator[Contradiction]:
    turns = TRANSPORTS.one_process(cfg.transport.kind)
    if turns and cfg.eval.every_s is not None and cfg.checkpoint.every_steps is None:
        yield Contradiction(
            ("eval.every_s", "transport.kind", "checkpoint.every_steps"),
            f"eval.every_s {cfg.eval.every_s:g} evaluates checkpoints, and with transport.kind "
            f"{cfg.transport.kind} these are written by steps only; set "
            "checkpoint.every_steps=1000 or eval.every_s=null",
        )


def _store(cfg: Sections) -> Iterator[Contradiction]:
    if cfg.actors.envs == "auto" and cfg.checkpoint.store is not None:
        yield Contradiction(
            ("actors.envs", "checkpoint.store"),
            "actors.envs auto is kept in the run folder, and a run that resumes from "
            "checkpoint.store in another folder needs the same number; set actors.envs to a "
            f"number, such as actors.envs={cfg.actor_envs}, or checkpoint.store=null",
        )


def _addresses(cfg: Sections) -> Iterator[Contradiction]:
    transport = cfg.transport
    spec = TRANSPORTS.specs.get(transport.kind)
    if spec is not None and not spec.reaches_other_hosts:
        for key in ("bind", "curve"):
            if getattr(transport, key) is not None:
                yield Contradiction(
                    (f"transport.{key}", "transport.kind"),
                    f"transport.{key} is for actors on other hosts, and transport.kind "
                    f"{transport.kind} works on one host only; set transport.kind=zmq or "
                    f"transport.{key}=null",
                )


def _keys(cfg: Sections) -> Iterator[Contradiction]:
    transport = cfg.transport
    if transport.insecure and transport.curve is not None:
        yield Contradiction(
            ("transport.insecure", "transport.curve"),
            "transport.insecure and transport.curve are both set; set only one of them",
        )
    exposed = transport.bind is not None and not is_local(transport.bind)
    if exposed and transport.curve is None and not transport.insecure:
        yield Contradiction(
            ("transport.bind", "transport.curve", "transport.insecure"),
            f"transport.bind {transport.bind} accepts connections from other hosts without "
            "authentication; set transport.curve to a folder of keys (penstock keys new), or "
            "transport.insecure=true on a trusted network",
        )


def _sinks(cfg: Sections) -> Iterator[Contradiction]:
    for spec in SINKS.specs.values():
        yield from spec.check(cfg.run)


# The options of `model` that have no effect on other algorithms than actor-critics.
ACTOR_CRITICS = ("core", "core_size", "critic", "gaussian", "log_std_init")


def network(cfg: Sections) -> Iterator[Contradiction]:
    """Combinations of the network with the algorithm and with the actors' inference."""
    yield from _off_policy(cfg)
    yield from _numpy_inference(cfg)
    model = cfg.model
    if model.settings and model.entry is None:
        yield Contradiction(
            ("model.settings", "model.entry"),
            "model.settings are arguments of the network that model.entry names, and model.entry "
            "is null; set model.entry, or model.settings={}",
        )


def _off_policy(cfg: Sections) -> Iterator[Contradiction]:
    algo, model, defaults = cfg.algo, cfg.model, ModelConfig()
    if algo.trains_on == "unrolls":
        return
    for key in ACTOR_CRITICS:
        value, default = getattr(model, key), getattr(defaults, key)
        if value != default:
            yield Contradiction(
                (f"model.{key}", "algo.name"),
                f"model.{key} {_shown(value)} is for actor-critics, and algo.name {algo.name} is "
                f"not one; set algo.name=ppo or model.{key}={_shown(default)}",
            )
            return


def _numpy_inference(cfg: Sections) -> Iterator[Contradiction]:
    if cfg.actors.inference != "numpy":
        return

    # Each option: whether its value is refused, and the values that numpy supports.
    model = cfg.model
    wrong = (
        ("kind", model.kind not in ("auto", "mlp"), "model.kind mlp only"),
        ("core", model.core != "none", "networks without core only"),
        ("critic", model.critic == "shared", "networks with a separate critic only"),
        ("entry", model.entry is not None, "Penstock's own networks only"),
    )
    for key, is_wrong, known in wrong:
        if is_wrong:
            yield Contradiction(
                ("actors.inference", f"model.{key}"),
                f"actors.inference numpy supports {known}, not {getattr(model, key)}; "
                "set actors.inference=torch",
            )
            return


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
