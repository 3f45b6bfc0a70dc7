"""Checks of combinations of options; each invalid one is a sentence with a remedy.

Each `_check_...` yields the invalid combinations of one kind.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.configs.games import check_games
from penstock.configs.group import check_group
from penstock.configs.league import ROUNDING
from penstock.configs.model import ModelConfig
from penstock.configs.policy_lag import lag_of, lent_by_batch, updates_of_batch
from penstock.configs.run import SINKS
from penstock.configs.schedules import LinearSchedule
from penstock.configs.section import Contradiction, Section
from penstock.configs.sections import ReplayConfig, Sections
from penstock.configs.transports import TRANSPORTS
from penstock.configs.value_types import is_local

LEAST_CONFIRMING = 10  # episodes that a confidence interval needs


def contradictions(cfg: Sections) -> list[Contradiction]:
    """Returns all invalid combinations in a config whose fields are each valid."""
    checks = (
        _check_batches,
        _check_rewards,
        _check_replay,
        _check_gathering,
        _check_algorithm,
        _check_compile,
        _check_inference,
        _check_lending,
        _check_learning_rate,
        _check_stop,
        _check_evaluation,
        _check_league,
        _check_store,
        _check_addresses,
        _check_keys,
        _check_sinks,
        _check_network,
        check_games,
        check_group,
    )
    return [contradiction for check in checks for contradiction in check(cfg)]


def _check_batches(cfg: Sections) -> Iterator[Contradiction]:
    """Check that slots can be made into batches, and batches divided into minibatches."""
    if cfg.algo.trains_on != "unrolls":
        return

    if cfg.algo.by_steps(cfg.model.core != "none"):
        yield from _check_minibatches_of_steps(cfg)
    else:
        yield from _check_minibatches_of_unrolls(cfg)
    yield from _check_waiting_slots(cfg)
    yield from _check_lag(cfg)


def _check_minibatches_of_unrolls(cfg: Sections) -> Iterator[Contradiction]:
    """Check that each minibatch has an equal share of a slot's environments."""
    updates = cfg.learner.updates_per_batch
    if cfg.actors.games:
        yield from _check_minibatches_of_seats(cfg)
        return
    envs = cfg.actor_envs
    if envs % updates == 0:
        return

    more_envs = -(-envs // updates) * updates
    fewer_updates = max(n for n in range(1, updates) if envs % n == 0)
    yield Contradiction(
        ("actors.envs", "learner.updates_per_batch"),
        f"actors.envs {envs} is not divisible by learner.updates_per_batch "
        f"{updates}, and each update takes an equal share of a slot's "
        f"environments; set actors.envs={more_envs} or "
        f"learner.updates_per_batch={fewer_updates}{_or_steps(cfg)}",
    )


def _check_minibatches_of_seats(cfg: Sections) -> Iterator[Contradiction]:
    """Check that each minibatch has an equal share of the slots, each of one seat of a game."""
    slots = cfg.learner.batch_slots
    updates = cfg.learner.updates_per_batch
    if slots % updates == 0:
        return

    yield Contradiction(
        ("learner.batch_slots", "learner.updates_per_batch"),
        f"learner.batch_slots {slots} is not divisible by learner.updates_per_batch {updates}, and "
        "each update takes an equal share of a batch's unrolls; set "
        f"learner.batch_slots={-(-slots // updates) * updates}{_or_steps(cfg)}",
    )


def _check_waiting_slots(cfg: Sections) -> Iterator[Contradiction]:
    """Check that the actors of a learner can fill a batch while they wait for it."""
    transport = cfg.transport
    learner = cfg.learner
    waiting = max(1, cfg.first_actors // learner.most_count) * transport.slots
    if waiting >= learner.batch_slots:
        return

    actors = -(-learner.batch_slots // transport.slots) * learner.most_count
    for_each = " for each learner" if learner.most_count > 1 else ""
    yield Contradiction(
        ("actors.count", "transport.slots", "learner.batch_slots"),
        f"learner.batch_slots {learner.batch_slots} is more than the {waiting} slots that "
        f"actors.count {_actors_count(cfg)} and transport.slots {transport.slots} provide"
        f"{for_each}; set "
        f"learner.batch_slots={waiting} or less, or actors.count={actors} or more",
    )


def _check_lag(cfg: Sections) -> Iterator[Contradiction]:
    """Check that the bound on lag allows the slots of a single batch."""
    least = lag_of(cfg, cfg.learner.batch_slots)
    if least <= cfg.transport.max_policy_lag or lent_by_batch(cfg):
        return

    updates = updates_of_batch(cfg)
    alternative = "0 for the synchronous mode"
    if updates > 1:
        alternative = (
            f"{updates - 1} or less to play a batch during the last steps of the one before"
        )
    yield Contradiction(
        ("transport.max_policy_lag", "learner.prefetch", "learner.publish_every"),
        f"transport.max_policy_lag {cfg.transport.max_policy_lag} is below {least}, the lag that "
        "learner.prefetch and learner.publish_every make with the slots of a single batch; set "
        f"transport.max_policy_lag={least}, or {alternative}",
    )


def _actors_count(cfg: Sections) -> str:
    """Returns `actors.count`, with the number at the start of a run where it may change."""
    count = cfg.actors.count
    return str(count) if isinstance(count, int) else f"{count} ({cfg.first_actors})"


def _check_minibatches_of_steps(cfg: Sections) -> Iterator[Contradiction]:
    """Check that a batch has a step for each minibatch, and that steps need no order."""
    updates = cfg.learner.updates_per_batch
    steps = cfg.actor_envs * cfg.actors.unroll * cfg.learner.batch_slots
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


def _check_lending(cfg: Sections) -> Iterator[Contradiction]:
    """Check a bound on lag with which slots are lent for one batch at a time."""
    lag = cfg.transport.max_policy_lag
    learner = cfg.learner
    bound = f"transport.max_policy_lag {lag} makes actors wait for the weights of each batch"
    higher = f"transport.max_policy_lag={max(1000, lag_of(cfg, learner.batch_slots))}"

    if lag == 0 and cfg.algo.trains_on != "unrolls":
        yield Contradiction(
            ("transport.max_policy_lag", "algo.name"),
            f"{bound}, and algo.name {cfg.algo.name} does not train on batches of fresh unrolls; "
            f"set {higher}, and transport.kind=inproc to play and train in turns",
        )
    if not lent_by_batch(cfg):
        return

    if learner.most_count > 1:
        yield Contradiction(
            ("transport.max_policy_lag", "learner.count"),
            f"{bound}, and with learner.count {learner.count} a learner also continues "
            f"without a batch of its own; set learner.count=1 or {higher}",
        )

    # In one process the actors take turns, so that each has the same number of a batch's slots.
    actors = cfg.first_actors
    slots = learner.batch_slots
    if TRANSPORTS.one_process(cfg.transport.kind) and slots % actors:
        multiple = -(-slots // actors) * actors
        yield Contradiction(
            ("transport.max_policy_lag", "transport.kind", "learner.batch_slots"),
            f"{bound}, and with transport.kind {cfg.transport.kind} each of actors.count "
            f"{_actors_count(cfg)} plays one slot per turn, so learner.batch_slots {slots} must be "
            f"a multiple of that; set learner.batch_slots={multiple}, actors.count=1 or {higher}",
        )


def _check_rewards(cfg: Sections) -> Iterator[Contradiction]:
    """Check that rewards which are normalised are not clipped or scaled as well."""
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


def _check_replay(cfg: Sections) -> Iterator[Contradiction]:
    """Check the options of `replay` with each other and with the algorithm."""
    if cfg.algo.trains_on == "unrolls":
        yield from _check_unused_replay(cfg)
        return

    yield from _check_replay_sizes(cfg.replay)
    if TRANSPORTS.one_process(cfg.transport.kind) and cfg.replay.samples_per_insert is None:
        yield Contradiction(
            ("replay.samples_per_insert", "transport.kind"),
            "replay.samples_per_insert null sets no limit after which the actors take their turn "
            f"(transport.kind {cfg.transport.kind}); set replay.samples_per_insert=8",
        )
    yield from _check_priorities(cfg.replay)


def _check_unused_replay(cfg: Sections) -> Iterator[Contradiction]:
    """Check that no option of `replay` is set for an algorithm without replay."""
    replay = cfg.replay
    defaults = type(replay)()
    keys = [key for key in type(replay).model_fields if _differ(key, replay, defaults)]
    # Without a replay no checkpoint contains one. Runs of version 0.1.0 say so in their configs.
    if replay.checkpoint is False:
        keys.remove("checkpoint")
    if not keys:
        return

    # An algorithm of the user's own has replay by another option.
    option = "name"
    remedy = "dqn"
    if cfg.algo.name == "custom":
        option = "data"
        remedy = "transitions"
    yield Contradiction(
        (*(f"replay.{key}" for key in keys), f"algo.{option}"),
        f"replay.{keys[0]} has no effect with algo.{option} {getattr(cfg.algo, option)}, which "
        f"does not use replay; set algo.{option}={remedy}, or replay={{}}",
    )


def _check_replay_sizes(replay: ReplayConfig) -> Iterator[Contradiction]:
    """Check that training can begin: the steps that it needs fit into half of the capacity."""
    half = replay.capacity // 2
    for key in ("min_size", "batch_size"):
        value = getattr(replay, key)
        if value <= half:
            continue

        remedy = f"replay.{key}={half} or less"
        if half == 0:
            remedy = f"replay.capacity={2 * value} or more"
        yield Contradiction(
            (f"replay.{key}", "replay.capacity"),
            f"replay.{key} {value} is more than half of replay.capacity {replay.capacity}, and "
            "each reset takes up the room of a step, so that with short episodes training "
            f"would never begin; set {remedy}",
        )


def _check_priorities(replay: ReplayConfig) -> Iterator[Contradiction]:
    """Check the options of prioritized replay with each other."""
    needs_errors = {"prioritized": True, "uniform": False}.get(replay.sampler or "")
    if needs_errors is not None and needs_errors is not replay.prioritized:
        yield Contradiction(
            ("replay.sampler", "replay.prioritized"),
            f"replay.sampler {replay.sampler} {'draws' if needs_errors else 'does not draw'} by TD "
            f"errors, and replay.prioritized is {_as_yaml(replay.prioritized)}; set "
            f"replay.prioritized={_as_yaml(needs_errors)}, or replay.sampler=null",
        )

    if replay.prioritized and replay.beta == 1 and replay.beta_steps is not None:
        yield Contradiction(
            ("replay.beta", "replay.beta_steps"),
            f"replay.beta_steps {replay.beta_steps} has no effect while replay.beta is 1; set "
            "replay.beta=0.4 or replay.beta_steps=null",
        )


def _check_gathering(cfg: Sections) -> Iterator[Contradiction]:
    """Check that options about batches of slots are not set for an algorithm with replay."""
    if cfg.algo.trains_on == "unrolls":
        return

    learner = cfg.learner
    defaults = type(learner)()
    reasons = {
        "updates_per_batch": "trains once on each batch that it samples from replay",
        "gather_threads": "does not gather slots into batches",
    }
    for key, reason in reasons.items():
        if _differ(key, learner, defaults):
            yield Contradiction(
                (f"learner.{key}", "algo.name"),
                f"learner.{key} {getattr(learner, key)} has no effect with algo.name "
                f"{cfg.algo.name}, which {reason}; set "
                f"learner.{key}={_as_yaml(getattr(defaults, key))}",
            )


def _check_algorithm(cfg: Sections) -> Iterator[Contradiction]:
    """Let the algorithm check its own options."""
    return cfg.algo.contradictions()


def _differ(key: str, section: Section, defaults: Section) -> bool:
    """Whether an option of a section has another value than the default."""
    return bool(getattr(section, key) != getattr(defaults, key))


def _check_compile(cfg: Sections) -> Iterator[Contradiction]:
    """Check that the network is compiled only for an algorithm that can do so."""
    if cfg.learner.compile and cfg.algo.trains_on != "unrolls":
        yield Contradiction(
            ("learner.compile", "algo.name"),
            f"learner.compile true does nothing for algo.name {cfg.algo.name}; set "
            "learner.compile=false",
        )


def _check_inference(cfg: Sections) -> Iterator[Contradiction]:
    """Check that inference by numpy has a number format of numpy."""
    if cfg.actors.inference == "numpy" and cfg.actors.precision == "bf16":
        yield Contradiction(
            ("actors.inference", "actors.precision"),
            "actors.inference numpy does not support actors.precision bf16; "
            "set actors.inference=torch or actors.precision=fp32",
        )


def _check_learning_rate(cfg: Sections) -> Iterator[Contradiction]:
    """Check that the learning rate falls in one way: by its schedule, or by `lr_end_fraction`."""
    keys = ("learner.lr_end_fraction", "learner.lr_decay_steps")
    lr = cfg.learner.lr
    fraction = cfg.learner.lr_end_fraction
    steps = cfg.learner.lr_decay_steps

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

    if isinstance(lr, LinearSchedule) and fraction != 1:
        yield Contradiction(
            ("learner.lr", *keys),
            f"learner.lr is a schedule from {lr.from_:g} to {lr.to:g}, and learner.lr_end_fraction "
            f"{fraction:g} would lower the rate too; set learner.lr={lr.from_:g}, or "
            "learner.lr_end_fraction=1 and learner.lr_decay_steps=null",
        )


def _check_stop(cfg: Sections) -> Iterator[Contradiction]:
    """Check the limits of a run that depend on its return."""
    if cfg.stop.hold_s and cfg.stop.return_ is None:
        yield Contradiction(
            ("stop.hold_s",),
            f"stop.hold_s {cfg.stop.hold_s:g} counts from the moment when stop.return is reached, "
            "and stop.return is null; set stop.return, or stop.minutes for a time limit",
        )

    episodes = cfg.stop.confirm_episodes
    if 0 < episodes < LEAST_CONFIRMING:
        yield Contradiction(
            ("stop.confirm_episodes",),
            f"stop.confirm_episodes {episodes} is too few to estimate the spread of returns; set "
            f"at least {LEAST_CONFIRMING}, or 0 to end the run by the return in training",
        )


def _check_evaluation(cfg: Sections) -> Iterator[Contradiction]:
    """Check that a run in one process writes the checkpoints that it evaluates."""
    one_process = TRANSPORTS.one_process(cfg.transport.kind)
    if one_process and cfg.eval.every_s is not None and cfg.checkpoint.every_steps is None:
        yield Contradiction(
            ("eval.every_s", "transport.kind", "checkpoint.every_steps"),
            f"eval.every_s {cfg.eval.every_s:g} evaluates checkpoints, and with transport.kind "
            f"{cfg.transport.kind} these are written by steps only; set "
            "checkpoint.every_steps=1000 or eval.every_s=null",
        )


def _check_league(cfg: Sections) -> Iterator[Contradiction]:
    """Check the shares of the learning rows, and what rules and resets need."""
    league = cfg.league
    shares = (league.mirror or 0.0) + sum(league.bots.values())
    if shares > 1.0 + ROUNDING:
        yield Contradiction(
            ("league.mirror", "league.bots"),
            f"league.mirror {_as_yaml(league.mirror)} and league.bots {league.bots} are shares of "
            f"the learning rows, and add up to {shares:g}; lower them so that it is 1 at most",
        )
    if league.draw == "nash" and league.seats is not None:
        yield Contradiction(
            ("league.draw", "league.seats"),
            f"league.draw nash needs sides that are alike, and with league.seats {league.seats} "
            "they are not; set league.draw=pfsp:squared",
        )
    if league.draw == "nash" and not cfg.has_evaluator:
        yield Contradiction(
            ("league.draw", "eval.every_steps", "eval.every_s", "transport.kind"),
            "league.draw nash goes by games that the evaluator plays, and this run has no "
            "evaluator; set eval.every_s=60, or league.draw=uniform",
        )
    if league.reset and cfg.learner.most_count > 1:
        yield Contradiction(
            ("league.reset", "learner.count"),
            f"league.reset resets the weights of one learner, and learner.count is "
            f"{cfg.learner.count}; set learner.count=1 or league.reset=false",
        )


def _check_store(cfg: Sections) -> Iterator[Contradiction]:
    """Check that a run which resumes in another folder knows its number of environments."""
    if cfg.actors.envs == "auto" and cfg.checkpoint.store is not None:
        yield Contradiction(
            ("actors.envs", "checkpoint.store"),
            "actors.envs auto is kept in the run folder, and a run that resumes from "
            "checkpoint.store in another folder needs the same number; set actors.envs to a "
            f"number, such as actors.envs={cfg.actor_envs}, or checkpoint.store=null",
        )


def _check_addresses(cfg: Sections) -> Iterator[Contradiction]:
    """Check that a transport for one host has no options about other hosts."""
    transport = cfg.transport
    spec = TRANSPORTS.specs.get(transport.kind)
    if spec is None or spec.reaches_other_hosts:
        return

    for key in ("bind", "curve"):
        if getattr(transport, key) is not None:
            yield Contradiction(
                (f"transport.{key}", "transport.kind"),
                f"transport.{key} is for actors on other hosts, and transport.kind "
                f"{transport.kind} works on one host only; set transport.kind=zmq or "
                f"transport.{key}=null",
            )


def _check_keys(cfg: Sections) -> Iterator[Contradiction]:
    """Check that an address which other hosts reach has keys, or goes without on purpose."""
    transport = cfg.transport
    if transport.insecure and transport.curve is not None:
        yield Contradiction(
            ("transport.insecure", "transport.curve"),
            "transport.insecure and transport.curve are both set; set only one of them",
        )

    is_exposed = transport.bind is not None and not is_local(transport.bind)
    if is_exposed and transport.curve is None and not transport.insecure:
        yield Contradiction(
            ("transport.bind", "transport.curve", "transport.insecure"),
            f"transport.bind {transport.bind} accepts connections from other hosts without "
            "authentication; set transport.curve to a folder of keys (penstock keys new), or "
            "transport.insecure=true on a trusted network",
        )


def _check_sinks(cfg: Sections) -> Iterator[Contradiction]:
    """Let each sink check its own options."""
    for spec in SINKS.specs.values():
        yield from spec.check(cfg.run)


# The options of `model` that have an effect only on algorithms that can remember.
CORES = ("core", "core_size", "core_inputs")
# The options of `model` that have no effect on other algorithms than actor-critics.
ACTOR_CRITICS = ("critic", "gaussian", "log_std_init")


def _check_network(cfg: Sections) -> Iterator[Contradiction]:
    """Check the network with the algorithm and with the actors' inference."""
    yield from _check_one_headed_network(cfg)
    yield from _check_numpy_network(cfg)

    model = cfg.model
    if model.settings and model.entry is None:
        yield Contradiction(
            ("model.settings", "model.entry"),
            "model.settings are arguments of the network that model.entry names, and model.entry "
            "is null; set model.entry, or model.settings={}",
        )
    if cfg.algo.must_remember and model.core == "none":
        yield Contradiction(
            ("algo.name", "model.core"),
            f"algo.name {cfg.algo.name} trains a network with memory, and model.core is none; set "
            "model.core=lstm, or algo.name=dqn",
        )
    if cfg.algo.can_remember and model.core_inputs and model.core == "none":
        yield Contradiction(
            ("model.core_inputs", "model.core"),
            f"model.core_inputs {_as_yaml(model.core_inputs)} are read by a core, and model.core "
            "is none; set model.core=lstm or model.core_inputs=[]",
        )


def _check_one_headed_network(cfg: Sections) -> Iterator[Contradiction]:
    """Check that no option of an actor-critic is set for another network; yields the first."""
    if cfg.algo.is_actor_critic:
        return

    defaults = ModelConfig()
    for key in CORES:
        if _differ(key, cfg.model, defaults) and not cfg.algo.can_remember:
            value = _as_yaml(getattr(cfg.model, key))
            yield Contradiction(
                (f"model.{key}", "algo.name"),
                f"model.{key} {value} is for actor-critics and r2d2, and "
                f"algo.name {cfg.algo.name} is neither; set algo.name=ppo, or for actions to "
                f"choose from algo.name=r2d2, or model.{key}={_as_yaml(getattr(defaults, key))}",
            )
            return

    for key in ACTOR_CRITICS:
        if _differ(key, cfg.model, defaults):
            yield Contradiction(
                (f"model.{key}", "algo.name"),
                f"model.{key} {_as_yaml(getattr(cfg.model, key))} is for actor-critics, and "
                f"algo.name {cfg.algo.name} is not one; set algo.name=ppo or "
                f"model.{key}={_as_yaml(getattr(defaults, key))}",
            )
            return


def _check_numpy_network(cfg: Sections) -> Iterator[Contradiction]:
    """Check that numpy can compute the network of the actors; yields the first contradiction."""
    if cfg.actors.inference != "numpy":
        return

    # Each option: whether its value is refused, and the values that numpy supports.
    model = cfg.model
    rules = (
        ("kind", model.kind not in ("auto", "mlp"), "model.kind mlp only"),
        ("core", model.core != "none", "networks without core only"),
        ("critic", model.critic == "shared", "networks with a separate critic only"),
        ("entry", model.entry is not None, "Penstock's own networks only"),
    )
    for key, is_refused, supported in rules:
        if is_refused:
            yield Contradiction(
                ("actors.inference", f"model.{key}"),
                f"actors.inference numpy supports {supported}, not {getattr(model, key)}; "
                "set actors.inference=torch",
            )
            return


def _as_yaml(value: object) -> str:
    """Returns the value of an option as a user writes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{', '.join(map(_as_yaml, value))}]"
    return "null" if value is None else str(value)
