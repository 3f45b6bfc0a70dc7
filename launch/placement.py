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
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.configs.errors import UserError
from penstock.configs.policy_lag import lent_by_batch
from penstock.configs.transports import AUTO, TRANSPORTS
from penstock.core.cores import most_actors
from penstock.core.interfaces import Bundle
from penstock.core.role_spec import RoleSpec, Stage
from penstock.transport.addresses import reachable

if TYPE_CHECKING:
    from penstock.configs.schema import Config

KEYS = "keys"
"""Name of the folder with the run's keys, in the run's folder."""
PORTS = range(20_000, 32_000)
"""Ports of a run, which are below those that Linux gives to outgoing connections."""
TRIES = 100
"""Most attempts to find free ports."""
BY_NETWORK = "zmq"
"""The transport by which actors on other hosts reach their learner."""
BUSY_STAGES = (Stage.LEARNER, Stage.SERVER, Stage.ACTORS)
"""What a host must have cores for; the other roles need little, or run at a lower priority."""


class RoleBundles(NamedTuple):
    """The roles of a run, and the bundles that they are in."""

    specs: tuple[RoleSpec, ...]
    bundles: tuple[Bundle, ...]


def adapt_to_hosts(config: Config, hosts: Sequence[int], run_dir: Path) -> Config:
    """Adapt the config of a run to the hosts of an engine.

    ``actors.count=auto`` becomes a number, or MIN..MAX: MIN fills a batch of each learner, and MAX
    fills the hosts, so that the run begins also where other programs use a part of them. With a
    MIN..MAX of learners, at least as many hosts as learners are expected.

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
    # Games connect to a process beside each learner, wherever that is.
    if config.actors.games:
        _check_served_learners(config, hosts, _learner_cores(config))
        return config
    if config.actors.count == "auto":
        config = _changed(config, "actors", count=_auto_actors(config, hosts))

    # Whether one host has the cores for all actors and learners, also for those that come later.
    learners_join = _learners_join(config)
    actors = most_actors(config)
    actors_grow = actors > config.first_actors
    learner_cores = _learner_cores(config)
    cores = learner_cores + actors * config.actors.threads
    only_host = len(hosts) == 1 and not actors_grow
    fits_one_host = not learners_join and (only_host or cores <= max(hosts))

    kind = config.transport.kind
    needs_one_host = TRANSPORTS.one_process(kind) or kind not in (AUTO, BY_NETWORK)
    if needs_one_host:
        _check_one_host(config, fits_one_host=fits_one_host, cores=cores)
    _check_served_learners(config, hosts, learner_cores)
    _check_bind(config)

    # Roles on other hosts need the network, an address and keys.
    bind = config.transport.bind
    apart = config.learner.server_spread or _has_gpus_apart(config, hosts)
    if needs_one_host or (fits_one_host and bind is None and not apart):
        return _changed(config, "actors", count=actors)
    changes: dict[str, Any] = {"kind": BY_NETWORK}
    if bind is None:
        changes["bind"] = f"tcp://*:{choose_port()}"
    if config.transport.curve is None and not config.transport.insecure:
        changes["curve"] = str(_make_keys(run_dir))
    return _changed(config, "transport", **changes)


def _check_one_host(config: Config, *, fits_one_host: bool, cores: int) -> None:
    """Raise UserError if a run whose transport needs one host also needs others.

    Args:
        config: the config of the run.
        fits_one_host: whether one host has the cores for all roles.
        cores: number of cores that all roles need.
    """
    kind = config.transport.kind
    count = config.learner.most_count
    if _learners_join(config):
        raise UserError(
            f"transport.kind {kind} keeps all actors on their learner's host, and learner.count "
            f"{config.learner.count} has learners on hosts of their own; set transport.kind=auto, "
            f"or learner.count={count}"
        )
    if not fits_one_host:
        raise UserError(
            f"transport.kind {kind} keeps all actors on their learner's host, and no host has the "
            f"{cores} cores of {most_actors(config)} actors and "
            f"{count} learners; set transport.kind=auto, or actors.count lower"
        )
    if config.learner.server_spread:
        raise UserError(
            f"transport.kind {kind} keeps the run on one host, and learner.server_spread true "
            "places the parameter server on others; set transport.kind=auto or "
            "learner.server_spread=false"
        )


def _check_served_learners(config: Config, hosts: Sequence[int], learner_cores: int) -> None:
    """Raise UserError if learners need one host for their parameter server, and none is enough.

    Args:
        config: the config of the run.
        hosts: number of cores of each host.
        learner_cores: number of cores that all learners need.
    """
    learner = config.learner
    if learner_cores <= max(hosts) or len(hosts) == 1:
        return
    if learner.served and not learner.server_spread:
        raise UserError(
            f"learner.pace {learner.pace} is for learners of one host, and no host has "
            f"{learner_cores} cores for {learner.count} learners; set learner.server_spread=true "
            "or learner.pace=bsp, or fewer"
        )


def _check_bind(config: Config) -> None:
    """Raise UserError if roles on several hosts listen, and the address is one of one host."""
    bind = config.transport.bind
    spreads = config.learner.server_spread
    if not bind or not (spreads or _learners_join(config)):
        return
    if reachable(bind) == bind:
        option = "server_spread true" if spreads else f"count {config.learner.count}"
        raise UserError(
            f"transport.bind {bind} is an address of one host, and learner.{option} needs ports of "
            "several; set transport.bind=tcp://*:PORT"
        )


def adapt_to_this_host(config: Config) -> Config:
    """Adapt the config of a run to an engine that has only this host.

    Raises:
        UserError: learners come and go with hosts.
    """
    if _learners_join(config):
        raise UserError(
            f"learner.count {config.learner.count} starts learners as hosts come and go, which "
            "only a Ray cluster has; add --engine ray, or set "
            f"learner.count={config.learner.most_count}"
        )
    return _without_spread(config)


def _without_spread(config: Config) -> Config:
    """Returns the config with the parameter server in the runtime folder, and at no port."""
    return _changed(config, "learner", server_spread=False)


def _learner_cores(config: Config) -> int:
    """Returns the number of cores of all learners."""
    return config.learner.most_count * config.learner.first_threads


def _learners_join(config: Config) -> bool:
    """Returns whether learners come and go with hosts."""
    return config.learner.most_count > config.learner.first_count


def _auto_actors(config: Config, hosts: Sequence[int]) -> int | str:
    """Returns what ``actors.count=auto`` is on the hosts of an engine.

    Args:
        config: the config of the run.
        hosts: number of cores of each host.

    Returns: a number of actors, or "MIN..MAX".
    """
    learner = config.learner
    threads = config.actors.threads
    least = config.least_actors
    count = learner.most_count
    learner_cores = _learner_cores(config)
    learners_join = _learners_join(config)

    # One host has as many actors per learner as its cores allow.
    if len(hosts) == 1 and not learners_join:
        actors_per_learner = (hosts[0] - learner_cores) // threads // count
        return max(least, actors_per_learner * count)

    # The cores that are left beside the learners with which the run begins.
    if learners_join or learner_cores > max(hosts) or _has_gpus_apart(config, hosts):
        bundle_cores = [learner.first_threads] * learner.first_count
    else:
        bundle_cores = [learner_cores]
    if learner.server_spread:
        bundle_cores += [1] * learner.server_shards
    free = _free_cores(hosts, bundle_cores)

    # Actors are placed in groups of one size.
    group_threads = _group_threads(free, threads)
    group_actors = group_threads // threads

    # Each further learner is expected on a host of its own, with room for actors.
    if learners_join:
        later_hosts = [max(hosts)] * max(0, count - len(hosts))
        free = _free_cores([*hosts, *later_hosts], [learner.first_threads] * count)
        # If a single actor fills a batch, those of the first learners suffice.
        if least == count:
            least = learner.first_count

    groups = sum(cores // group_threads for cores in free)
    actors_per_learner = groups * group_actors // count
    most = max(least, actors_per_learner * count)
    least_groups = -(-least // group_actors)
    first = min(most, least_groups * group_actors)
    if first == most or lent_by_batch(config):
        return most
    return f"{first}..{most}"


def _free_cores(hosts: Sequence[int], bundle_cores: Sequence[int]) -> list[int]:
    """Returns the free cores of each host beside bundles.

    Each bundle goes to the host with the most free cores.

    Args:
        hosts: number of cores of each host.
        bundle_cores: number of cores of each bundle.
    """
    free = list(hosts)
    for cores in bundle_cores:
        host = max(range(len(free)), key=free.__getitem__)
        free[host] = max(0, free[host] - cores)
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
    several_gpus = learner.most_count > 1 and learner.device.startswith("cuda")
    may_be_apart = not learner.served or learner.server_spread
    return len(hosts) > 1 and several_gpus and may_be_apart


def _changed(config: Config, section: str, **changes: Any) -> Config:
    """Returns the config with other values in one section."""
    changed_section = getattr(config, section).model_copy(update=changes)
    return config.model_copy(update={section: changed_section})


def _make_keys(run_dir: Path) -> Path:
    """Returns the folder of the run's own keys, which are made if there are none."""
    from penstock.transport.zmq.keys import make_keys

    folder = run_dir / KEYS
    if not (folder / "learner.key").exists():
        make_keys(folder)
    return folder


def make_bundles(specs: Sequence[RoleSpec], hosts: Sequence[int] = ()) -> RoleBundles:
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
    shards = [spec for spec in specs if hosts and spec.stage is Stage.SERVER and _on_network(spec)]
    others = [spec for spec in specs if spec not in shards]
    with_learners = [spec for spec in others if not _is_apart(spec)]
    actors = [spec for spec in others if _is_apart(spec) and not spec.relays]
    relays = [spec for spec in others if _is_apart(spec) and spec.relays]

    # Learners and shards come first.
    most_cores = max(hosts, default=None)
    roles_of = _group_with_learners(with_learners, most_cores, by_network=bool(actors))
    roles_of |= {shard.name: [shard] for shard in shards}

    # Actors use the cores that these leave, in groups that fit on several hosts.
    first_bundles = [_bundle(name, group) for name, group in roles_of.items()]
    hosts_may_join = not all(bundle.required for bundle in first_bundles)
    if actors and (len(hosts) > 1 or (hosts and hosts_may_join)):
        free = _free_cores(hosts, [bundle.cpus for bundle in first_bundles if bundle.required])
        most_cores = _group_threads(free, actors[0].threads)
    groups = [
        *_group_actors(actors, most_cores, spare=False),
        *_group_actors(actors, most_cores, spare=True),
    ]

    # Each group has relays of its own, with further indices.
    for number, group in enumerate(groups):
        name = "actors" if len(groups) == 1 else f"actors-{number}"
        first_index = number * len(relays)
        group_is_spare = group[0].spare
        group_relays = [
            replace(relay, index=first_index + relay.index, spare=group_is_spare or relay.spare)
            for relay in relays
        ]
        roles_of[name] = group + group_relays

    return RoleBundles(
        specs=tuple(spec for group in roles_of.values() for spec in group),
        bundles=tuple(_bundle(name, group) for name, group in roles_of.items() if group),
    )


def _group_with_learners(
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
    apart = by_network and not served and any(spec.gpus or spec.spare for spec in learners)
    if cores is None or len(learners) == 1:
        return {"learners": list(specs)}
    if not apart and sum(spec.threads for spec in learners) <= cores:
        return {"learners": list(specs)}

    return {
        learner.name: [spec for spec in specs if spec.learner == learner.learner]
        for learner in learners
    }


def choose_port() -> int:
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
    candidates = range(PORTS.start, PORTS.stop - max(offsets, default=0))
    port = candidates.start
    for port in random.SystemRandom().sample(candidates, min(TRIES, len(candidates))):
        if all(_is_free(host, port + offset) for offset in offsets):
            break
    return port


def _is_free(host: str, port: int) -> bool:
    """Returns whether a process can listen at a port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        # ZeroMQ listens with this option too.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def with_addresses(
    specs: Sequence[RoleSpec], hosts: Mapping[str, str], bundles: Sequence[Bundle], port: int
) -> tuple[RoleSpec, ...]:
    """Fill in the addresses that depend on hosts: those of connectors, and where learners meet.

    Args:
        specs: the roles.
        hosts: address of each role's host by the role's name, as of `Engine.endpoints`; empty for a
            role that has no host yet, whose address stays.
        bundles: the bundles of the roles.
        port: first port for the meetings of learners, from `choose_port`.

    Returns: the roles, in the same order.
    """
    # Learners of several bundles meet over the network.
    learners = {spec.name for spec in specs if spec.stage is Stage.LEARNER}
    learner_bundles = [bundle for bundle in bundles if not learners.isdisjoint(bundle.roles)]
    if len(learner_bundles) > 1:
        specs = [_with_meeting_point(spec, hosts[spec.name], port) for spec in specs]

    # On one host, addresses are as they were.
    used_hosts = {hosts[spec.name] for spec in specs}
    if len(used_hosts) <= 1 and all(bundle.required for bundle in bundles):
        return tuple(specs)

    # An address at which a role listens becomes one of its host, for all that connect to it.
    address_on_host: dict[str, str] = {}
    for spec in specs:
        host = hosts[spec.name]
        if spec.listens and spec.address and host:
            address_on_host[reachable(spec.address)] = reachable(spec.address, host)
    return tuple(
        replace(
            spec,
            address=address_on_host.get(spec.address or "", spec.address),
            servers=tuple(address_on_host.get(address, address) for address in spec.servers),
        )
        for spec in specs
    )


def _with_meeting_point(spec: RoleSpec, host: str, port: int) -> RoleSpec:
    """Returns a learner with the address at which it serves meetings; other roles as they are."""
    if spec.stage is not Stage.LEARNER:
        return spec
    return replace(spec, meets_at=f"{host}:{port + spec.learner}")


def _on_network(spec: RoleSpec) -> bool:
    """Returns whether a role listens at, or connects to, an address of a network."""
    return (spec.address or "").startswith("tcp://")


def _is_apart(spec: RoleSpec) -> bool:
    """Returns whether a role reaches its learner over a network."""
    return spec.joins and _on_network(spec)


def _group_actors(
    actors: Sequence[RoleSpec], cores: int | None, *, spare: bool
) -> Iterator[list[RoleSpec]]:
    """Yields actors in groups that fit on a host.

    Args:
        actors: all actors.
        cores: most threads of a group; None: no limit.
        spare: whether to group those that are spare, or those that are not.
    """
    group: list[RoleSpec] = []
    group_threads = 0
    for actor in actors:
        if actor.spare != spare:
            continue
        if group and cores and group_threads + actor.threads > cores:
            yield group
            group = []
            group_threads = 0

        group.append(actor)
        group_threads += actor.threads
    if group:
        yield group


def _bundle(name: str, specs: Sequence[RoleSpec]) -> Bundle:
    """Returns a bundle of roles, with the resources that they need.

    The cores of spare roles count only if all roles are spare.
    """
    required = not all(spec.spare for spec in specs)
    busy = [spec for spec in specs if spec.stage in BUSY_STAGES and not (required and spec.spare)]
    return Bundle(
        name=name,
        roles=tuple(spec.name for spec in specs),
        cpus=sum(spec.threads for spec in busy),
        gpus=sum(spec.gpus for spec in specs),
        required=required,
        spread=all(spec.stage is Stage.SERVER for spec in specs),
    )
