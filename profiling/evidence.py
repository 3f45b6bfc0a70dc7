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

NEAR = 0.05  # shares of windows of some seconds that differ by less are alike
# Of the cores: a run that uses less can use as much, however busy other programs are, as the
# scheduler then takes it from them.
FAIR = 0.25


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


class Evidence:
    """The figures of the learner that holds the run up, and of its actors and connectors.

    Learners that step together go as fast as one of them, which is the one that waits least for the
    others; of several that wait as little, the one that computes least.
    """

    def __init__(self, profile: Profile) -> None:
        """``profile`` has a learner at least."""
        self.learners = _living(profile["learner"])
        self.learner = critical(self.learners)

        self.seconds = float(profile.get("seconds") or 0.0)
        self.cores = float(profile.get("cores") or 1)
        self.device = str(profile.get("device") or "cpu")
        self.flow: Mapping[str, Any] = profile.get("flow") or {}
        self._config: Mapping[str, Any] = profile.get("config") or {}
        self._host_idle_cores: float | None = profile.get("idle_cores")

        trials = profile.get("env_threads")
        self.thread_trials = None if trials is None else [ThreadTrial(**trial) for trial in trials]
        """By rising numbers, the first is that of the run; empty where threads do not step the
        environment, None where nothing was tried."""

        kinds = ("learner", "actors", "connectors", "others")
        self._everybody = [role for kind in kinds for role in profile.get(kind) or ()]
        self.all_actors = _living(profile["actors"])
        self.actors = self._own(self.all_actors)
        self.connectors = self._own(_living(profile["connectors"]))

    def option(self, section: str, name: str, default: Any) -> Any:
        """Returns an option of the run, or ``default`` where the profile lacks it.

        A ``section`` within another one is named after it, as "learner.reduce".
        """
        found = self._config
        for key in section.split("."):
            found = found.get(key) or {}
        return found.get(name, default)

    def share(self, part: str) -> float:
        """Returns the share of a part, one of `LearnerPart`, in the learner's clock."""
        return float(self.learner["ledger"].get(part, 0.0))

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
    def gather_exposed(self) -> float:
        """Share of the learner's clock in which it waits for a batch to be gathered.

        The learner gathers it, or draws it from replay, or waits for the thread that does.
        """
        return float(self.learner["parts"].get("gather", 0.0))

    @property
    def gathers_ahead(self) -> bool:
        """Whether a thread gathers batches, or draws them from replay, while the learner trains."""
        if "feeder" in (self.learner.get("threads") or {}):
            return True
        return self.option("learner", "prefetch", 0) != 0 and not self.lent_by_batch

    @property
    def from_replay(self) -> bool:
        """Whether it trains on batches that are drawn from replay."""
        return bool(self.option("algo", "trains_on", "unrolls") == "transitions")

    @property
    def between_kernels(self) -> float:
        """Share of the learner's clock in which its GPU was to compute, and ran no kernel."""
        kernels = self.learner.get("gpu_kernel_busy")
        return 0.0 if kernels is None else max(0.0, self.share("compute") - float(kernels))

    @property
    def gains_by_bf16(self) -> bool:
        """Whether its network may be faster in bf16 than in fp32, which the options prescribe."""
        fp32 = self.option("learner", "precision", "auto") == "fp32"
        return fp32 and (self.device != "cpu" or self.option("model", "convolutional", False))

    @property
    def wait(self) -> float:
        """Share of the learner's clock in which no batch can be made.

        Actors have not played enough, or with replay not enough for `replay.samples_per_insert`.
        """
        return max(0.0, self.share("wait_data") - self.gather_exposed)

    @property
    def idle(self) -> bool:
        """Whether the learner had data, and yet has trained nothing."""
        rates = (self.learner.get("steps_per_s"), self.learner.get("updates_per_s"))
        return self.wait < NEAR and not any(rates)

    @property
    def missing_in_replay(self) -> float:
        """Steps that the replay of all learners must still take in before there is a first batch.

        0 once it has been trained on, and without replay.
        """
        size = self.flow.get("replay_size")
        if size is None or self.learner.get("updates_per_s"):
            return 0.0
        least = max(int(self.option("replay", name, 0)) for name in ("min_size", "batch_size"))
        return max(0.0, float(least * len(self.learners)) - float(size))

    @property
    def feeder(self) -> float:
        """Share of its clock in which the thread that gathers ahead is at work; 0 without one."""
        parts = (self.learner.get("threads") or {}).get("feeder") or {}
        return float(parts.get("gather", 0.0) + parts.get("h2d", 0.0))

    @property
    def computes(self) -> str:
        """How busy the learner is, and how near its ceiling."""
        text = f"utilization is {percent(self.share('compute'))}"
        near = self.learner.get("achieved_over_ceiling")
        return text if near is None else f"{text} and its rate {percent(near)} of its ceiling"

    def played(self, *parts: str) -> float:
        """Mean share of its actors' clocks in these parts."""
        return fmean(_in(a, *parts) for a in self.actors) if self.actors else 0.0

    @property
    def env_rests(self) -> float:
        """Mean share of its actors' clocks in which they are in a step and do not compute: the
        environment waits, or they have no core. 0 where their processor time is not known."""
        return fmean(_rests(a) for a in self.actors) if self.actors else 0.0

    @property
    def env_waits(self) -> float:
        """As `env_without_computing`, without the time in which the actors had no core."""
        return fmean(_rests(a, _coreless(a)) for a in self.actors) if self.actors else 0.0

    @property
    def wanted_steps_per_s(self) -> float:
        """What the learner would train if it never waited: its ceiling where that was measured."""
        ceiling = self.learner.get("ceiling_steps_per_s")
        if ceiling:
            return float(ceiling)
        return float(self.learner.get("steps_per_s") or 0.0) / max(1.0 - self.wait, 0.01)

    @property
    def actor_steps_per_s(self) -> float:
        """Mean rate of its actors."""
        return fmean(_rate(a) for a in self.actors) if self.actors else 0.0

    @property
    def busy_cores(self) -> float:
        """Cores that all processes of the run keep busy."""
        return sum(float(role.get("cpu") or 0.0) for role in self._everybody)

    @property
    def idle_cores(self) -> float:
        """Cores that nothing on the host keeps busy; nothing of the run where that is unknown."""
        idle = max(0.0, self.cores - self.busy_cores)
        return idle if self._host_idle_cores is None else min(idle, self._host_idle_cores)

    @property
    def free_cores(self) -> float:
        """Cores that the run could use beyond those that it does."""
        return max(self.idle_cores, FAIR * self.cores - self.busy_cores)

    @property
    def learner_cpu_s(self) -> float:
        """Processor time that the learner takes for a step that is played."""
        rate = float(self.learner.get("steps_per_s") or 0.0)
        return self.learner_cpu / rate if rate else 0.0

    @property
    def learner_cpu(self) -> float:
        """Cores that the learner keeps busy."""
        return float(self.learner.get("cpu") or 0.0)

    @property
    def coreless(self) -> float:
        """Share of the window in which the learner could have worked and had no core.

        The kernel counts that; where it does not, it is what the learner computes by its ledger
        without working.
        """
        counted = self.learner.get("coreless")
        if counted is not None:
            return float(counted)
        return max(0.0, self.share("compute") - self.learner_cpu) if self.device == "cpu" else 0.0

    @property
    def below_ceiling(self) -> float:
        """Share of the learner's clock in which it computes and would not at its ceiling's rate."""
        near = self.learner.get("achieved_over_ceiling")
        # Without `replay.samples_per_insert`, steps that arrive say nothing of those drawn.
        if near is None or self.option("replay", "samples_per_insert", 1.0) is None:
            return 0.0
        return max(0.0, self.share("compute") - float(near))

    @property
    def room_for_actors(self) -> int:
        """How many more actors like these the free cores would carry.

        That includes what the learner needs for their steps. The last one fits by half at least,
        and all together are not more than `auto` starts.
        """
        if not self.all_actors:
            return 0

        rate = self.actor_steps_per_s
        own = fmean(_wanted_cores(a) for a in self.all_actors)
        if self.thread_trials:  # they count the programs that an actor has started, too
            own = max(own, rate * self.thread_trials[0].cpu_s)
        each = own + rate * self.learner_cpu_s

        carried = math.floor(self.free_cores / max(each, 0.01) + 0.5)
        return max(0, min(carried, self.most_actors - len(self.all_actors)))

    @property
    def most_actors(self) -> int:
        """The most that `actors.count=auto` starts."""
        return int(ACTORS_PER_CORE * self.cores)

    def slowest(self) -> tuple[Role, float, float] | None:
        """Returns the slowest of its actors; None where fewer than two have a pace.

        Actors that do nothing but wait have none.
        """
        paces = [(p, a) for a in self.actors if (p := _pace(a)) is not None]
        if len(paces) < 2:
            return None
        pace, actor = min(paces, key=lambda found: found[0])
        return actor, pace, median(p for p, a in paces if a is not actor)

    def dropped(self, reason: str) -> float:
        """Returns the share of all steps played that were dropped for this reason."""
        played = float(self.flow.get("produced_steps_per_s") or 0.0) * self.seconds
        steps = float((self.flow.get("dropped") or {}).get(reason, 0))
        return min(1.0, steps / played) if played else 0.0

    @property
    def reduction(self) -> float:
        """Share that even the learner which waits least for the others spends reducing."""
        return min(_exchange(rank) for rank in self.learners)

    @property
    def exchanging(self) -> float:
        """Share in which gradients are on their way, overlapped or not."""
        lane = (self.learner.get("threads") or {}).get("reduce")
        return self.reduction if lane is None else float(lane.get("reduce", 0.0))

    @property
    def others_wait(self) -> float:
        """Mean share in which the other learners wait for this one in the reduction."""
        others = [_exchange(rank) for rank in self.learners if rank is not self.learner]
        return max(0.0, fmean(others) - _exchange(self.learner)) if others else 0.0

    def _own(self, roles: Sequence[Role]) -> list[Role]:
        rank = self.learner.get("rank", 0)
        return [role for role in roles if role.get("learner", 0) == rank]


def _living(roles: Sequence[Role]) -> Sequence[Role]:
    """Returns the roles that had not ended when the window did; all of them if none is left."""
    return [role for role in roles if not role.get("ended")] or roles


def _exchange(learner: Role) -> float:
    """Returns the share in which a learner waits for the others, or for their parameter server."""
    return _in(learner, "reduce_exposed", "pull_exposed")


def critical(learners: Sequence[Role]) -> Role:
    """Returns the learner that the others wait for."""
    least = min(_exchange(rank) for rank in learners)
    near = [rank for rank in learners if _exchange(rank) <= least + NEAR]
    return min(near, key=lambda rank: _in(rank, "compute"))


def most(role: Role) -> tuple[str, float]:
    """The part that has the largest share of a role's clock, and that share."""
    ledger: Mapping[str, float] = role["ledger"] or {"other": 0.0}
    part = max(ledger, key=lambda name: ledger[name])
    return part, ledger[part]


def percent(share: float) -> str:
    """0.414 -> "41 %"."""
    return f"{share:.0%}".replace("%", " %")


def _in(role: Role, *parts: str) -> float:
    return float(sum(role["ledger"].get(part, 0.0) for part in parts))


def _wanted_cores(role: Role) -> float:
    """Returns the cores that a process would keep busy if it got one whenever it can run."""
    runs = 1.0 - float(role.get("coreless") or 0.0)
    return float(role.get("cpu") or 0.0) / max(runs, 0.01)


def _coreless(role: Role) -> float:
    """Returns the share in which a process had no core.

    Where neither kernel nor metrics tell, that may be as long as it had one.
    """
    coreless = role.get("coreless")
    return float((role.get("cpu") or 0.0) if coreless is None else coreless)


def _rests(actor: Role, otherwise: float = 0.0) -> float:
    """Share of an actor's clock in which it is in a step and does not compute, without the share in
    which it does ``otherwise``."""
    cpu = actor.get("cpu")
    if cpu is None:
        return 0.0
    rests = 1.0 - _in(actor, "wait", "send") - float(cpu) - otherwise
    return min(_in(actor, "step"), max(0.0, rests))


def _rate(role: Role) -> float:
    return float(role.get("steps_per_s") or 0.0)


def _pace(actor: Role) -> float | None:
    """Returns the steps per second of an actor while it does not wait."""
    works = 1.0 - _in(actor, "wait")
    return _rate(actor) / works if works > 0.1 else None
