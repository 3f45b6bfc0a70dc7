"""The figures of a profile on one learner, its actors and connectors, for the rules of verdicts.

Shares are of wall time, unless another whole is named. Whatever a profile lacks counts as 0: a
window may have seen no actor, or no step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from penstock.core.cores import ACTORS_PER_CORE

Profile = Mapping[str, Any]
Role = Mapping[str, Any]

# Shares that differ by less are alike: two windows of some seconds of the same run differ as much.
SIMILAR_SHARES = 0.05
# A run that uses less than this share of the cores can use as much, however busy other programs
# are, as the scheduler then takes it from them.
FAIR_SHARE = 0.25
# If an actor works for less than this share of its time, its rate says little about the pace of
# that work.
LEAST_WORK = 0.1
# The divisor where a share of time, or a number of cores, is about 0.
LEAST_SHARE = 0.01


class ThreadTrial(NamedTuple):
    """The measurement of one actor that played alone with a number of `actors.env_threads`."""

    threads: int
    steps_per_s: float
    cpu: float
    """Cores that the actor and the programs that it has started keep busy."""

    @property
    def cpu_s(self) -> float:
        """Processor time of a step."""
        return self.cpu / self.steps_per_s


class SlowestActor(NamedTuple):
    """The slowest of several actors. A pace is in steps per second while not waiting."""

    actor: Role
    pace: float
    others_pace: float
    """The median of the other actors' paces."""


class Evidence:
    """The figures of the learner that holds the run up, and of its actors and connectors.

    Learners that step together go as fast as one of them, which is the one that waits least for the
    others; of several that wait as little, the one that computes least.
    """

    def __init__(self, profile: Profile) -> None:
        """``profile`` has a learner at least."""
        self.learners = _living(profile["learner"])
        self.learner = critical(self.learners)
        """The learner that holds the run up."""
        self.all_actors = _living(profile["actors"])
        self.actors = self._own(self.all_actors)
        """The actors that play for this learner."""
        self.connectors = self._own(_living(profile["connectors"]))
        """The connectors that receive for this learner."""

        self.seconds = float(profile.get("seconds") or 0.0)
        """The length of the window."""
        self.cores = float(profile.get("cores") or 1)
        """How many the run may use."""
        self.device = str(profile.get("device") or "cpu")
        """What learners train on, "cpu" or "cuda"."""
        self.flow: Mapping[str, Any] = profile.get("flow") or {}
        """What moved in the window."""

        trials = profile.get("env_threads")
        self.thread_trials = None if trials is None else [ThreadTrial(**trial) for trial in trials]
        """Trials by rising numbers of threads, the first with that of the run; empty where threads
        do not step the environment, None where nothing was tried."""

        kinds = ("learner", "actors", "connectors", "others")
        self._processes = [role for kind in kinds for role in profile.get(kind) or ()]
        self._config: Mapping[str, Any] = profile.get("config") or {}
        self._host_idle_cores: float | None = profile.get("idle_cores")

    def option(self, section: str, name: str, default: Any) -> Any:
        """Returns an option of the run, or ``default`` where the profile lacks it.

        A ``section`` within another one is named after it, as "learner.reduce".
        """
        options = self._config
        for key in section.split("."):
            options = options.get(key) or {}
        return options.get(name, default)

    @property
    def games_play(self) -> bool:
        """Whether games play, which drive their own loop, in place of actors."""
        return bool(self.option("actors", "games", False))

    # The learner

    def share(self, part: str) -> float:
        """Returns the share of a part, one of `LearnerPart`, in the learner's clock."""
        return float(self.learner["ledger"].get(part, 0.0))

    @property
    def wait(self) -> float:
        """Share of the learner's clock in which no batch can be made.

        Actors have not played enough, or with replay not enough for `replay.samples_per_insert`.
        """
        return max(0.0, self.share("wait_data") - self.gather_exposed)

    @property
    def gather_exposed(self) -> float:
        """Share of the learner's clock in which it waits for a batch to be gathered.

        The learner gathers it, or draws it from replay, or waits for the thread that does.
        """
        return float(self.learner["parts"].get("gather", 0.0))

    @property
    def trained_nothing(self) -> bool:
        """Whether the learner had data, and yet has trained nothing."""
        rates = (self.learner.get("steps_per_s"), self.learner.get("updates_per_s"))
        return self.wait < SIMILAR_SHARES and not any(rates)

    @property
    def between_kernels(self) -> float:
        """Share of the learner's clock in which its GPU was to compute, and ran no kernel."""
        kernel_share = self.learner.get("gpu_kernel_busy")
        if kernel_share is None:
            return 0.0
        return max(0.0, self.share("compute") - float(kernel_share))

    @property
    def below_ceiling(self) -> float:
        """Share of the learner's clock in which it computes and would not at its ceiling's rate."""
        achieved = self.learner.get("achieved_over_ceiling")
        # Without `replay.samples_per_insert`, steps that arrive say nothing of those drawn.
        if achieved is None or self.option("replay", "samples_per_insert", 1.0) is None:
            return 0.0
        return max(0.0, self.share("compute") - float(achieved))

    @property
    def coreless(self) -> float:
        """Share of the window in which the learner could have worked and had no core.

        The kernel counts that; where it does not, it is what the learner computes by its ledger
        without working.
        """
        counted = self.learner.get("coreless")
        if counted is not None:
            return float(counted)
        if self.device != "cpu":
            return 0.0
        return max(0.0, self.share("compute") - self.learner_cpu)

    @property
    def learner_cpu(self) -> float:
        """Cores that the learner keeps busy."""
        return float(self.learner.get("cpu") or 0.0)

    @property
    def learner_cpu_s(self) -> float:
        """Processor time that the learner takes for a step that is played."""
        rate = float(self.learner.get("steps_per_s") or 0.0)
        return self.learner_cpu / rate if rate else 0.0

    @property
    def wanted_steps_per_s(self) -> float:
        """What the learner would train if it never waited: its ceiling where that was measured."""
        ceiling = self.learner.get("ceiling_steps_per_s")
        if ceiling:
            return float(ceiling)
        rate = float(self.learner.get("steps_per_s") or 0.0)
        return rate / max(1.0 - self.wait, LEAST_SHARE)

    @property
    def gains_by_bf16(self) -> bool:
        """Whether its network may be faster in bf16 than in fp32, which the options prescribe."""
        fp32 = self.option("learner", "precision", "auto") == "fp32"
        return fp32 and (self.device != "cpu" or self.option("model", "convolutional", False))

    def describe_learner(self) -> str:
        """Returns how busy the learner is, and how near its ceiling, as part of a sentence."""
        text = f"utilization is {percent(self.share('compute'))}"
        achieved = self.learner.get("achieved_over_ceiling")
        if achieved is None:
            return text
        return f"{text} and its rate {percent(achieved)} of its ceiling"

    # Its batches

    @property
    def from_replay(self) -> bool:
        """Whether it trains on batches that are drawn from replay."""
        return bool(self.option("algo", "trains_on", "unrolls") == "transitions")

    @property
    def missing_in_replay(self) -> float:
        """Steps that the replay of all learners must still take in before there is a first batch.

        0 once it has been trained on, and without replay.
        """
        size = self.flow.get("replay_size")
        if size is None or self.learner.get("updates_per_s"):
            return 0.0
        needed = max(int(self.option("replay", name, 0)) for name in ("min_size", "batch_size"))
        return max(0.0, float(needed * len(self.learners)) - float(size))

    @property
    def updates_of_batch(self) -> int:
        """Optimizer steps that the learner takes with a batch of unrolls."""
        updates = self.option("learner", "updates_per_batch", 1)
        return int(updates * self.option("algo", "passes", 1))

    @property
    def lent_by_batch(self) -> bool:
        """Whether actors play a batch only late in the training on the one before, or after it."""
        return bool(self.option("transport", "lent_by_batch", False))

    @property
    def gathers_ahead(self) -> bool:
        """Whether a thread gathers batches, or draws them from replay, while the learner trains."""
        if "feeder" in (self.learner.get("threads") or {}):
            return True
        return self.option("learner", "prefetch", 0) != 0 and not self.lent_by_batch

    @property
    def feeder_busy(self) -> float:
        """Share of its clock in which the thread that gathers ahead is at work; 0 without one."""
        parts = (self.learner.get("threads") or {}).get("feeder") or {}
        return float(parts.get("gather", 0.0) + parts.get("h2d", 0.0))

    # Other learners

    @property
    def reduction(self) -> float:
        """Share that even the learner which waits least for the others spends reducing."""
        return min(_exchange(learner) for learner in self.learners)

    @property
    def exchanging(self) -> float:
        """Share in which gradients are on their way, overlapped or not."""
        thread = (self.learner.get("threads") or {}).get("reduce")
        return self.reduction if thread is None else float(thread.get("reduce", 0.0))

    @property
    def others_wait(self) -> float:
        """Mean share in which the other learners wait for this one in the reduction."""
        other_learners = [learner for learner in self.learners if learner is not self.learner]
        if not other_learners:
            return 0.0
        others_share = fmean(_exchange(learner) for learner in other_learners)
        return max(0.0, others_share - _exchange(self.learner))

    # Its actors

    def actors_share(self, *parts: str) -> float:
        """Returns the mean share of its actors' clocks in these parts; 0 without actors."""
        if not self.actors:
            return 0.0
        return fmean(_share_in(actor, *parts) for actor in self.actors)

    @property
    def actor_steps_per_s(self) -> float:
        """Mean rate of its actors."""
        return fmean(_rate(actor) for actor in self.actors) if self.actors else 0.0

    @property
    def env_without_computing(self) -> float:
        """Mean share of its actors' clocks in which they are in a step and do not compute.

        The environment waits, or they have no core. 0 where their processor time is not known.
        """
        if not self.actors:
            return 0.0
        return fmean(_step_without_computing(actor) for actor in self.actors)

    @property
    def env_waits(self) -> float:
        """As `env_without_computing`, without the time in which the actors had no core."""
        if not self.actors:
            return 0.0
        return fmean(_step_without_computing(actor, _coreless(actor)) for actor in self.actors)

    def slowest(self) -> SlowestActor | None:
        """Returns the slowest of its actors; None where fewer than two have a pace.

        Actors that do nothing but wait have none.
        """
        working = [actor for actor in self.actors if _works(actor)]
        if len(working) < 2:
            return None
        slowest = min(working, key=_pace)
        others_pace = median(_pace(actor) for actor in working if actor is not slowest)
        return SlowestActor(slowest, _pace(slowest), others_pace)

    def dropped(self, reason: str) -> float:
        """Returns the share of all steps played that were dropped for this reason."""
        played_steps = float(self.flow.get("produced_steps_per_s") or 0.0) * self.seconds
        if not played_steps:
            return 0.0
        dropped_steps = float((self.flow.get("dropped") or {}).get(reason, 0))
        return min(1.0, dropped_steps / played_steps)

    # Cores

    @property
    def busy_cores(self) -> float:
        """Cores that all processes of the run keep busy."""
        return sum(float(process.get("cpu") or 0.0) for process in self._processes)

    @property
    def idle_cores(self) -> float:
        """Cores that nothing on the host keeps busy; nothing of the run where that is unknown."""
        idle = max(0.0, self.cores - self.busy_cores)
        if self._host_idle_cores is None:
            return idle
        return min(idle, self._host_idle_cores)

    @property
    def free_cores(self) -> float:
        """Cores that the run could use beyond those that it does."""
        return max(self.idle_cores, FAIR_SHARE * self.cores - self.busy_cores)

    @property
    def most_actors(self) -> int:
        """The most that `actors.count=auto` starts."""
        return int(ACTORS_PER_CORE * self.cores)

    @property
    def room_for_actors(self) -> int:
        """How many more actors like these the free cores would carry.

        That includes what the learner needs for their steps. The last one fits by half at least,
        and all together are not more than `auto` starts.
        """
        if not self.all_actors:
            return 0

        steps_per_s = self.actor_steps_per_s
        actor_cores = fmean(_wanted_cores(actor) for actor in self.all_actors)
        if self.thread_trials:  # they count the programs that an actor has started, too
            actor_cores = max(actor_cores, steps_per_s * self.thread_trials[0].cpu_s)
        cores_per_actor = actor_cores + steps_per_s * self.learner_cpu_s

        carried = math.floor(self.free_cores / max(cores_per_actor, LEAST_SHARE) + 0.5)
        return max(0, min(carried, self.most_actors - len(self.all_actors)))

    def _own(self, roles: Sequence[Role]) -> list[Role]:
        """Returns the actors or connectors that belong to the learner."""
        rank = self.learner.get("rank", 0)
        return [role for role in roles if role.get("learner", 0) == rank]


def _living(roles: Sequence[Role]) -> Sequence[Role]:
    """Returns the roles that had not ended when the window did; all of them if none is left."""
    return [role for role in roles if not role.get("ended")] or roles


def _exchange(learner: Role) -> float:
    """Returns the share in which a learner waits for the others, or for their parameter server."""
    return _share_in(learner, "reduce_exposed", "pull_exposed")


def critical(learners: Sequence[Role]) -> Role:
    """Returns the learner that the others wait for."""
    least = min(_exchange(learner) for learner in learners)
    candidates = [learner for learner in learners if _exchange(learner) <= least + SIMILAR_SHARES]
    return min(candidates, key=lambda learner: _share_in(learner, "compute"))


def largest_part(role: Role) -> tuple[str, float]:
    """Returns the part that has the largest share of a role's clock, and that share."""
    ledger: Mapping[str, float] = role["ledger"] or {"other": 0.0}
    part = max(ledger, key=lambda name: ledger[name])
    return part, ledger[part]


def percent(share: float) -> str:
    """0.414 -> "41 %"."""
    return f"{share:.0%}".replace("%", " %")


def _share_in(role: Role, *parts: str) -> float:
    """Returns the share of a role's clock in these parts together."""
    return float(sum(role["ledger"].get(part, 0.0) for part in parts))


def _wanted_cores(role: Role) -> float:
    """Returns the cores that a process would keep busy if it got one whenever it can run."""
    with_core = 1.0 - float(role.get("coreless") or 0.0)
    return float(role.get("cpu") or 0.0) / max(with_core, LEAST_SHARE)


def _coreless(role: Role) -> float:
    """Returns the share in which a process had no core.

    Where neither kernel nor metrics tell, that may be as long as it had one.
    """
    coreless = role.get("coreless")
    if coreless is None:
        return float(role.get("cpu") or 0.0)
    return float(coreless)


def _step_without_computing(actor: Role, coreless: float = 0.0) -> float:
    """Returns the share of an actor's clock in which it is in a step and does not compute.

    The share ``coreless`` is not counted. 0 where the actor's processor time is not known.
    """
    cpu = actor.get("cpu")
    if cpu is None:
        return 0.0
    not_computing = 1.0 - _share_in(actor, "wait", "send") - float(cpu) - coreless
    return min(_share_in(actor, "step"), max(0.0, not_computing))


def _rate(role: Role) -> float:
    """Returns the steps per second of a role; 0 where they are not known."""
    return float(role.get("steps_per_s") or 0.0)


def _pace(actor: Role) -> float:
    """Returns the steps per second of an actor while it does not wait."""
    return _rate(actor) / (1.0 - _share_in(actor, "wait"))


def _works(actor: Role) -> bool:
    """Whether an actor works for long enough to have a pace."""
    return 1.0 - _share_in(actor, "wait") > LEAST_WORK
