"""Where the roles of a run go when an engine has several hosts.

All roles go to one host if the largest has the cores for them: samples and weights then stay in
shared memory. Otherwise learners, with what shares their memory, are on one host, or on one each if
none has the cores for all of them, if each needs a GPU or if their number changes; and actors, with
a relay for the weights of each learner, are in bundles on others. They send samples over ZeroMQ,
encrypted with keys of the run. With `learner.server_spread` each shard of the parameter server is
in a bundle of its own.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.configs.errors import UserError
from penstock.configs.policy_lag import lent_by_batch
from penstock.configs.transports import AUTO, TRANSPORTS
from penstock.core.cores import most_actors
from penstock.core.interfaces import Bundle
from penstock.core.role_spec import RoleSpec, Stage
from penstock.transport.addresses import reachable

if TYPE_CHECKING:
    from penstock.configs.schema import Config

# Name of the folder with the run's keys, in the run's folder.
KEYS = "keys"
# Ports of a run, which are below those that Linux gives to outgoing connections.
PORTS = range(20_000, 32_000)
# Most attempts to find free ports.
TRIES = 100
# The transport by which actors on other hosts reach their learner.
BY_NETWORK = "zmq"
BUSY = (Stage.LEARNER, Stage.SERVER, Stage.ACTORS)
"""What a host must have cores for; the other roles need little, or run at a lower priority."""


def on_hosts(config: Config, hosts: Sequence[int], run_dir: Path) -> Config:
    """Adapt the config of a run to the hosts of an engine.

    ``actors.count=auto`` becomes a number, or MIN..MAX: MIN fills a batch of each learner, and MAX
    fills the hosts, so that the run begins also where other programs use a part of them.

    Hosts may come later if the number of actors or of learners is MIN..MAX. All roles are on one
    host only if that has the cores for all of them, and never with a MIN..MAX of learners. Several
    learners with a GPU each are not on one host, as the GPUs of a host are not known here.

    If actors are on other hosts than their learner, an address is chosen for the connection, and
    keys are made in the run's folder.

    Args:
        config: the config of the run.
        hosts: number of cores of each host; at least one.
        run_dir: the run's folder.

    Raises:
        UserError: the transport, pace or address of the config needs another placement.
    """
    if len(hosts) == 1:
        config = _without_spread(config)

    # The cores that learners and actors need, and whether one host has them.
    learners = config.learner.most_count * config.learner.first_threads
    most = max(hosts)
    joins = config.learner.most_count > config.learner.first_count
    if config.actors.count == "auto":
        config = _changed(config, "actors", count=_by_hosts(config, hosts))
    most_now, grows = most_actors(config), most_actors(config) > config.first_actors
    actors = most_now * config.actors.threads
    kind = config.transport.kind
    together = TRANSPORTS.one_process(kind) or kind not in (AUTO, BY_NETWORK)
    fits = not joins and ((len(hosts) == 1 and not grows) or learners + actors <= most)

    # Refuse what contradicts the placement.
    if together and joins:
        raise UserError(
            f"transport.kind {kind} keeps all actors on their learner's host, and learner.count "
            f"{config.learner.count} has learners on hosts of their own; set transport.kind=auto, "
            f"or learner.count={config.learner.most_count}"
        )
    if together and not fits:
        raise UserError(
            f"transport.kind {kind} keeps all actors on their learner's host, and no host has the "
            f"{learners + actors} cores of {most_now} actors and "
            f"{config.learner.most_count} learners; set transport.kind=auto, or actors.count lower"
        )

    served = config.learner.served
    if learners > most and len(hosts) > 1 and served and not config.learner.server_spread:
        raise UserError(
            f"learner.pace {config.learner.pace} is for learners of one host, and no host has "
            f"{learners} cores for {config.learner.count} learners; set learner.server_spread=true "
            "or learner.pace=bsp, or fewer"
        )

    if together and config.learner.server_spread:
        raise UserError(
            f"transport.kind {kind} keeps the run on one host, and learner.server_spread true "
            "places the parameter server on others; set transport.kind=auto or "
            "learner.server_spread=false"
        )

    bind, spreads = config.transport.bind, config.learner.server_spread
    if (spreads or joins) and bind and reachable(bind) == bind:
        option = "server_spread true" if spreads else f"count {config.learner.count}"
        raise UserError(
            f"transport.bind {bind} is an address of one host, and learner.{option} needs ports of "
            "several; set transport.bind=tcp://*:PORT"
        )

    # Roles on other hosts need the network, an address and keys.
    apart = spreads or _has_gpus_apart(config, hosts)
    if together or (fits and bind is None and not apart):
        return _changed(config, "actors", count=most_now)
    changes: dict[str, Any] = {"kind": BY_NETWORK}
    if bind is None:
        changes["bind"] = f"tcp://*:{any_port()}"
    if config.transport.curve is None and not config.transport.insecure:
        changes["curve"] = str(_keys(run_dir))
    return _changed(config, "transport", **changes)


def on_this_host(config: Config) -> Config:
    """Adapt the config of a run to an engine that has only this host.

    Raises:
        UserError: learners come and go with hosts.
    """
    if config.learner.first_count < (most := config.learner.most_count):
        raise UserError(
            f"learner.count {config.learner.count} starts learners as hosts come and go, which "
            f"only a Ray cluster has; add --engine ray, or set learner.count={most}"
        )
    return _without_spread(config)


def _without_spread(config: Config) -> Config:
    """Returns the config with the parameter server in the runtime folder, and at no port."""
    return _changed(config, "learner", server_spread=False)


def _by_hosts(config: Config, hosts: Sequence[int]) -> int | str:
    """Returns what ``actors.count=auto`` is on the hosts of an engine.

    Args:
        config: the config of the run.
        hosts: number of cores of each host.

    Returns: a number of actors, or "MIN..MAX".
    """
    learner, threads, least = config.learner, config.actors.threads, config.least_actors
    count, first_count = learner.most_count, learner.first_count
    joins = count > first_count

    # One host has as many actors per learner as its cores allow.
    if len(hosts) == 1 and not joins:
        left = hosts[0] - count * learner.first_threads
        return max(least, left // threads // count * count)

    # The cores that are left beside the learners with which the run begins.
    apart = joins or count * learner.first_threads > max(hosts) or _has_gpus_apart(config, hosts)
    shards = [1] * (learner.server_shards * learner.server_spread)
    of_each = [learner.first_threads]
    free = _free(
        hosts, (of_each * first_count if apart else [count * learner.first_threads]) + shards
    )

    # Actors are placed in groups of one size.
    size = _group_threads(free, threads)
    each = size // threads

    # Each further learner is expected on a host of its own, with room for actors.
    if joins:
        later = [max(hosts)] * max(0, count - len(hosts))
        free = _free([*hosts, *later], of_each * count)
        # If a single actor fills a batch, those of the first learners suffice.
        if least == count:
            least = first_count

    most = max(least, sum(cores // size for cores in free) * each // count * count)
    first = min(most, -(-least // each) * each)
    return most if first == most or lent_by_batch(config) else f"{first}..{most}"


def _free(hosts: Sequence[int], learners: Sequence[int]) -> list[int]:
    """Returns the free cores of each host beside bundles of learners.

    Each bundle goes to the host with the most free cores.

    Args:
        hosts: number of cores of each host.
        learners: number of threads of each bundle.
    """
    free = list(hosts)
    for threads in learners:
        host = max(range(len(free)), key=free.__getitem__)
        free[host] = max(0, free[host] - threads)
    return free


def _group_threads(free: Sequence[int], threads: int) -> int:
    """Choose the size of the groups of actors that use the free cores of hosts best.

    Groups of one size fit wherever the engine places them. As each also has relays, a core is
    counted for them: large groups are better if they fill hosts as well.

    Args:
        free: number of free cores of each host.
        threads: number of threads of an actor.

    Returns: number of threads of a group, a multiple of ``threads``.
    """

    def value(size: int) -> tuple[int, int]:
        """Returns the cores of actors with groups of a size, less and with those of relays."""
        groups = sum(cores // size for cores in free)
        return groups * (size - 1), groups * size

    return max(range(threads, max(threads, *free) + 1, threads), key=value)


def _has_gpus_apart(config: Config, hosts: Sequence[int]) -> bool:
    """Returns whether learners are on hosts of their own, as each needs a GPU."""
    learner = config.learner
    on_gpus = learner.most_count > 1 and learner.device.startswith("cuda")
    return len(hosts) > 1 and on_gpus and (not learner.served or learner.server_spread)


def _changed(config: Config, section: str, **changes: Any) -> Config:
    """Returns the config with other values in one section."""
    made = getattr(config, section).model_copy(update=changes)
    return config.model_copy(update={section: made})


def _keys(run_dir: Path) -> Path:
    """Returns the folder of the run's own keys, which are made if there are none."""
    from penstock.transport.zmq.keys import new

    folder = run_dir / KEYS
    if not (folder / "learner.key").exists():
        new(folder)
    return folder


def bundles(
    specs: Sequence[RoleSpec], hosts: Sequence[int] = ()
) -> tuple[tuple[RoleSpec, ...], tuple[Bundle, ...]]:
    """Group the roles of a run into bundles, each of which is placed on one host.

    Learners are in a bundle with the roles that share their memory or Unix sockets, and with the
    parameter server. Actors that reach their learner over a network are in bundles of their own,
    with relays, and so is each shard of a parameter server that listens there. Bundles of spare
    learners and actors are not required.

    Args:
        specs: the roles, with one relay for each learner.
        hosts: number of cores of each host, which limit a bundle; empty: no limit.

    Returns: the roles, with relays for each bundle of actors; and the bundles.
    """
    shards = [s for s in specs if hosts and s.stage is Stage.SERVER and _on_network(s)]
    specs = [spec for spec in specs if spec not in shards]
    apart = [spec for spec in specs if _is_apart(spec)]
    actors = [spec for spec in apart if not spec.relays]
    relays = [spec for spec in apart if spec.relays]
    together = [spec for spec in specs if not _is_apart(spec)]

    # Learners and shards come first.
    cores = max(hosts, default=None)
    found = _with_learners(together, cores, by_network=bool(actors))
    found |= {shard.name: [shard] for shard in shards}

    # Actors use the cores that these leave, in groups that fit on several hosts.
    with_learners = [_bundle(name, group) for name, group in found.items()]
    if actors and (len(hosts) > 1 or (hosts and not all(b.required for b in with_learners))):
        free = _free(hosts, [bundle.cpus for bundle in with_learners if bundle.required])
        cores = _group_threads(free, actors[0].threads)
    groups = [g for spare in (False, True) for g in _groups(actors, cores, spare)]

    # Each group has relays of its own, with further indices.
    for number, group in enumerate(groups):
        shift, spare = number * len(relays), group[0].spare
        own = [
            replace(relay, index=relay.index + shift, spare=spare or relay.spare)
            for relay in relays
        ]
        found["actors" if len(groups) == 1 else f"actors-{number}"] = group + own

    everything = tuple(spec for group in found.values() for spec in group)
    return everything, tuple(_bundle(name, group) for name, group in found.items() if group)


def _with_learners(
    specs: Sequence[RoleSpec], cores: int | None, *, by_network: bool
) -> dict[str, list[RoleSpec]]:
    """Group the roles that are with learners: into one bundle, or one for each learner.

    Learners that need a GPU each have bundles of their own if actors reach them over a network: the
    engine finds the hosts that have GPUs, be it one with several. So have learners whose number
    changes. A parameter server needs its learners with it.

    Args:
        specs: the roles.
        cores: number of cores of the largest host; None: no limit.
        by_network: whether actors reach learners over a network.

    Returns: the roles of each bundle by its name.
    """
    learners = [spec for spec in specs if spec.stage is Stage.LEARNER]
    served = any(spec.stage is Stage.SERVER for spec in specs)
    spread = by_network and not served and any(spec.gpus or spec.spare for spec in learners)
    if cores is None or len(learners) == 1:
        return {"learners": list(specs)}
    if not spread and sum(spec.threads for spec in learners) <= cores:
        return {"learners": list(specs)}

    return {
        learner.name: [spec for spec in specs if spec.learner == learner.learner]
        for learner in learners
    }


def any_port() -> int:
    """Returns a random port for the meetings of learners.

    It is the first of as many as there are learners.
    """
    return random.SystemRandom().choice(PORTS)


def free_port(host: str, offsets: Collection[int]) -> int:
    """Find free ports of this machine.

    If no free ones are found in `TRIES` attempts, or another program takes one meanwhile, the
    process that cannot listen there reports it.

    Args:
        host: the address at which processes will listen.
        offsets: the distances of the ports from the one that is returned.

    Returns: a random port from which all offsets lead to free ports.
    """
    firsts = range(PORTS.start, PORTS.stop - max(offsets, default=0))
    port = firsts.start
    for port in random.SystemRandom().sample(firsts, min(TRIES, len(firsts))):
        if all(_is_free(host, port + offset) for offset in offsets):
            break
    return port


def _is_free(host: str, port: int) -> bool:
    """Returns whether a process can listen at a port."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def placed(
    specs: Sequence[RoleSpec], hosts: Mapping[str, str], bundles: Sequence[Bundle], port: int
) -> tuple[RoleSpec, ...]:
    """Fill in the addresses that depend on hosts: those of connectors, and where learners meet.

    Args:
        specs: the roles.
        hosts: address of each role's host by the role's name, as of `Engine.endpoints`; empty for a
            role that has no host yet, whose address stays.
        bundles: the bundles of the roles.
        port: first port for the meetings of learners, from `any_port`.

    Returns: the roles, in the same order.
    """
    learners = {spec.name for spec in specs if spec.stage is Stage.LEARNER}
    if sum(not learners.isdisjoint(bundle.roles) for bundle in bundles) > 1:
        specs = [
            replace(s, meets_at=f"{hosts[s.name]}:{port + s.learner}") if s.name in learners else s
            for s in specs
        ]

    # On one host, addresses are as they were.
    if len({hosts[spec.name] for spec in specs}) <= 1 and all(b.required for b in bundles):
        return tuple(specs)

    # Roles reach an address at which another listens by the address of its host.
    binds = [(s.address, hosts[s.name]) for s in specs if s.listens and s.address]
    ways = {reachable(bind): reachable(bind, host) for bind, host in binds if host}
    return tuple(
        replace(
            spec,
            address=ways.get(spec.address or "", spec.address),
            servers=tuple(ways.get(address, address) for address in spec.servers),
        )
        for spec in specs
    )


def _on_network(spec: RoleSpec) -> bool:
    """Returns whether a role listens at, or connects to, an address of a network."""
    return (spec.address or "").startswith("tcp://")


def _is_apart(spec: RoleSpec) -> bool:
    """Returns whether a role reaches its learner over a network."""
    return spec.joins and _on_network(spec)


def _groups(actors: Sequence[RoleSpec], cores: int | None, spare: bool) -> Iterator[list[RoleSpec]]:
    """Yields actors in groups that fit on a host.

    Args:
        actors: all actors.
        cores: most threads of a group; None: no limit.
        spare: whether to group those that are spare, or those that are not.
    """
    group: list[RoleSpec] = []
    for spec in (actor for actor in actors if actor.spare == spare):
        if group and cores and sum(s.threads for s in group) + spec.threads > cores:
            yield group
            group = []
        group.append(spec)
    if group:
        yield group


def _bundle(name: str, specs: Sequence[RoleSpec]) -> Bundle:
    """Returns a bundle of roles, with the resources that they need.

    Spare roles count only if all are spare.
    """
    required = not all(spec.spare for spec in specs)
    busy = [spec for spec in specs if spec.stage in BUSY and not (required and spec.spare)]
    gpus = sum(spec.gpus for spec in specs)
    roles = tuple(spec.name for spec in specs)
    spread = all(spec.stage is Stage.SERVER for spec in specs)
    return Bundle(name, roles, sum(spec.threads for spec in busy), gpus, required, spread)
