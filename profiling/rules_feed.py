"""Rules for a learner that waits for data. They find one cause: the stage that limits the flow.

The stages are checked from the learner towards the actors, against the direction of samples. The
first stage that is always busy is the limit; the stages before it only wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from penstock.profiling.evidence import FAIR, Evidence, ThreadTrial, most, percent
from penstock.profiling.rule import (
    ALIKE,
    BUSY,
    EXPLAINS,
    HELPS,
    SLOW,
    WAITS,
    WORTH,
    Kind,
    Rule,
    Verdict,
    empty,
)

AFTER_FILLING_S = 30  # of a window, to see training in
UNTRIED_THREADS = 16  # at most, where their number was not tried


def waits_for_data(e: Evidence) -> Verdict | None:
    """The learner has nothing to train on."""
    if e.wait < WORTH:
        return None

    # The last cause always applies.
    found = next(verdict for cause in CAUSES if (verdict := cause(e)))
    ratio = e.option("replay", "samples_per_insert", None)
    if not e.from_replay or ratio is None or found.kind in LIMITED_OTHERWISE:
        return found
    return replace(
        found,
        reason=f"{found.reason}; replay.samples_per_insert={ratio:g} is reached, so nothing is "
        "drawn before more is played",
        next_step=f"{found.next_step}; or draw each step more often: a larger "
        "replay.samples_per_insert",
    )


def replay_is_filling(e: Evidence) -> Verdict | None:
    """Nothing is drawn from replay before it holds enough."""
    missing = e.missing_in_replay
    rate = float(e.flow.get("produced_steps_per_s") or 0.0)
    if not missing or not rate:
        return None

    size, left_s = float(e.flow["replay_size"]), math.ceil(missing / rate)
    return Verdict(
        "filling",
        f"replay is still filling: training begins {missing:,.0f} steps from now",
        f"it holds {size:,.0f} of the {size + missing:,.0f} steps that replay.min_size asks for; "
        f"actors bring {rate:,.0f} a second, which takes {left_s:,} s more",
        f"begin sooner with a smaller replay.min_size, or profile the training after that with "
        f"--seconds {left_s + AFTER_FILLING_S}",
        e.wait,
    )


def feeder_is_busy(e: Evidence) -> Verdict | None:
    """The thread that gathers cannot keep up with what arrives."""
    return gather_is_slow(e, e.wait) if e.feeder >= BUSY else None


def gather_is_slow(e: Evidence, share: float) -> Verdict:
    """The learner waits this ``share`` of its time for the thread that gathers."""
    smaller = "make samples smaller (uint8 observations, fewer recorded values)"
    if e.from_replay:
        smaller = (
            "draw less: a smaller replay.batch_size, smaller observations, transport.frame_stack "
            "for stacked frames, or replay.prioritized=false"
        )
    return Verdict(
        "slow_gather",
        f"gathering is slow: the learner waits {percent(share)} for it",
        f"the feeder thread gathers {percent(e.feeder)} of the time"
        if e.feeder
        else "the feeder thread gathers batches ahead, and is late",
        f"{smaller}; or spread them over learner.count={len(e.learners) + 1} learners",
        share,
    )


def connector_is_busy(e: Evidence) -> Verdict | None:
    """The process that receives cannot keep up."""
    if not e.connectors:
        return None
    connector = max(e.connectors, key=lambda role: 1.0 - role["ledger"].get("wait", 0.0))
    busy = 1.0 - connector["ledger"].get("wait", 0.0)
    if not connector["ledger"] or busy < BUSY:
        return None

    part, share = most({"ledger": {**connector["ledger"], "wait": 0.0}})
    steps = {
        "decompress": "send samples as they are, if the network carries it: transport.codec=none",
        "receive": "send fewer and larger messages: a larger actors.unroll or actors.envs",
        "process": "the algorithm's work on a slot is the limit: look at its process()",
    }
    more = f"learner.count={len(e.learners) + 1} brings another connector"
    return Verdict(
        "slow_wire",
        f"the wire is slow: the learner waits {percent(e.wait)} for the connector",
        f"{connector['name']} is busy {percent(busy)} of the time, {percent(share)} in {part}",
        f"{steps[part]}; {more}" if part in steps else more,
        e.wait,
    )


def one_actor_is_slow(e: Evidence) -> Verdict | None:
    """One of several actors makes far less than the others."""
    found = e.slowest()
    if found is None:
        return None
    actor, pace, others = found
    lost = (others - pace) / max(others * len(e.actors), 1e-9)
    if pace >= SLOW * others or lost < EXPLAINS * e.wait:
        return None
    part, share = most(actor)
    return Verdict(
        "straggler",
        f"{actor['name']} is slow, which costs {percent(min(e.wait, lost))} of the throughput",
        f"the learner waits {percent(e.wait)} for data; {actor['name']} plays {pace:,.0f} steps/s "
        f"and the others {others:,.0f}; it spends {percent(share)} in {part}",
        f"look at {actor['name']}: its host, what else runs there, and its games (`penstock "
        "stacks RUN` shows where it is)",
        min(e.wait, lost),
    )


def actors_elsewhere(e: Evidence) -> Verdict | None:
    """The profile contains no actor of this learner."""
    if e.actors:
        return None
    if e.connectors:
        return Verdict(
            "starved",
            f"actors of other hosts are too slow: the learner waits {percent(e.wait)} for data",
            "the connector waits for them too, and none is on this host",
            "start more of them (`penstock actor`), or profile one of those hosts",
            e.wait,
        )
    return empty("no actor plays", "see why actors end (logs/ in the run's folder)", e.wait)


def plays_and_trains_in_turns(e: Evidence) -> Verdict | None:
    """Actors may not play the next batch early enough."""
    lag, updates = int(e.option("transport", "max_policy_lag", 0)), e.updates_of_batch
    if not e.lent_by_batch or e.played("wait") < WORTH:  # else they are busy all the time
        return None
    missing = math.ceil(e.wait / max(e.share("compute"), WORTH) * updates)
    more = lag + missing
    if more >= updates:  # a batch ahead
        more = max(1000, int(e.option("transport", "least_lag", 0)))
    after = f"when {lag} of the {updates} updates of this one are left" if lag else "after this one"
    return Verdict(
        "turns",
        f"actors and learner take turns: the learner waits {percent(e.wait)} for data",
        f"{_actors(e)} may play the next batch only {after}",
        f"let them begin earlier, with older weights: transport.max_policy_lag={more}",
        e.wait,
    )


def actors_work(e: Evidence) -> Verdict:
    """The learner waits for what its actors spend most of their time in."""
    # With a connector, an actor waits for its turn to send, otherwise for a slot of the learner.
    wire, room = ("wait",) if e.connectors else (), () if e.connectors else ("wait",)

    shares: dict[Kind, float] = {
        "slow_environment": e.played("step"),
        "slow_inference": e.played("infer"),
        "slow_wire": e.played("compress", "send", *wire),
        "few_slots": e.played(*room),
        "slow_actor": e.played("write", "process", "other"),
    }
    kind = max(shares, key=lambda name: shares[name])
    return WORK[kind](e, shares[kind])


def environment_is_slow(e: Evidence, share: float) -> Verdict:
    """Actors spend this ``share``, most of their time, in steps of the environment."""
    if e.env_waits > WAITS * share or helpful_threads(e):
        return environment_waits(e, share)
    return Verdict(
        "slow_environment",
        f"the environment is slow: the learner waits {percent(e.wait)} for data",
        f"{_actors(e)} spend {percent(share)} in env.step",
        more_actors(e, "a faster environment helps"),
        e.wait,
    )


def environment_waits(e: Evidence, share: float) -> Verdict:
    """In env.step, which takes this ``share`` of their time, actors wait for something outside."""
    return Verdict(
        "waiting_environment",
        f"the environment waits: the learner waits {percent(e.wait)} for data",
        f"{_actors(e)} spend {percent(share)} in env.step, {percent(e.env_rests)} without "
        "computing: a step waits for something outside of the actor, such as a sleep, a socket or "
        "another program",
        _shorter_wait(e),
        e.wait,
    )


def _shorter_wait(e: Evidence) -> str:
    """Returns how more steps are made of an environment that waits.

    That is by threads, where a trial has shown that they help, or else by actors.
    """
    trials = e.thread_trials
    if trials is None:
        return _untried_threads(e)
    if not trials:
        more = more_actors(e, "more actors.envs help too, if its step takes no longer with them")
        return f"{more}; actors.env_threads does nothing for its own vector form"
    tried = f"in a trial, one actor made {trials[0].steps_per_s:,.0f} steps/s with "
    tried += f"{trials[0].threads} of actors.env_threads"
    if best := helpful_threads(e):
        return (
            f"step its environments side by side: actors.env_threads={best.threads}; {tried} and "
            f"{best.steps_per_s:,.0f} with {best.threads}"
        )
    if len(trials) == 1:
        return more_actors(e, "each environment of an actor has a thread already")
    fastest = max(trials, key=lambda trial: trial.steps_per_s)
    return more_actors(e, f"{tried} and {fastest.steps_per_s:,.0f} with {fastest.threads}")


def _untried_threads(e: Evidence) -> str:
    """Returns the advice where no trial was made: the page has no environment at hand."""
    envs, threads = (e.option("actors", name, 1) for name in ("envs", "env_threads"))
    if not isinstance(envs, int) or threads >= envs:
        return more_actors(e, "a faster environment helps")
    return (
        f"step its environments side by side: actors.env_threads={min(envs, UNTRIED_THREADS)}, if "
        "they are single ones, Atari's or EnvPool's; `penstock profile` on one host tries which "
        "number helps"
    )


def helpful_threads(e: Evidence) -> ThreadTrial | None:
    """Returns the trial of the smallest number of threads that is about as good as the best.

    None where none is better than that of the run, by far, or nothing was tried. The gain of
    threads is that of the trial, as far as there are cores for the actors, the programs that they
    have started, and the learner.
    """
    trials = e.thread_trials
    if not trials:
        return None
    now, supply = trials[0], e.actor_steps_per_s * len(e.actors) * len(e.learners)
    # What the trial had of the cores, the run can have.
    used = supply * (now.cpu_s + e.learner_cpu_s)
    cores = max(e.idle_cores + used, FAIR * e.cores, *(trial.cpu for trial in trials))

    def gain(trial: ThreadTrial) -> float:
        side_by_side = trial.steps_per_s / now.steps_per_s
        carried = min(cores, e.cores) / max(trial.cpu_s + e.learner_cpu_s, 1e-9)
        return min(side_by_side, carried / supply) if supply else side_by_side

    most = max(map(gain, trials))
    return next(t for t in trials if ALIKE * gain(t) >= most) if most >= HELPS else None


def inference_is_slow(e: Evidence, share: float) -> Verdict:
    """Actors spend this ``share``, most of their time, in the policy's network."""
    cheaper = "a smaller network helps, and more actors.envs make a step's share of it cheaper"
    if e.option("actors", "precision", "auto") == "fp32":
        cheaper = f"actors.precision=auto takes the faster format; {cheaper}"
    return Verdict(
        "slow_inference",
        f"inference is slow: the learner waits {percent(e.wait)} for data",
        f"{_actors(e)} spend {percent(share)} in the policy's network",
        more_actors(e, cheaper),
        e.wait,
    )


def wire_is_slow(e: Evidence, share: float) -> Verdict:
    """Actors spend this ``share``, most of their time, on sending or waiting to send."""
    raw, coded = (
        sum(float(c.get(name) or 0.0) for c in e.connectors) / 1e6
        for name in ("raw_nbytes_per_s", "coded_nbytes_per_s")
    )
    compress = e.played("compress")
    if compress > share / 2:
        step = "send samples as they are, if the network carries it: transport.codec=none"
    elif e.option("transport", "codec", "auto") == "none":
        step = "send less: transport.codec=auto"
    else:
        slots = int(e.option("transport", "slots", 2))
        step = (
            f"keep more on its way, transport.slots={slots + 1}; if the network is full, make "
            "observations smaller (uint8), or play on the learner's host"
        )
    return Verdict(
        "slow_wire",
        f"the wire is slow: the learner waits {percent(e.wait)} for data",
        f"{_actors(e)} spend {percent(share)} on sending ({percent(compress)} compressing); the "
        f"wire carries {coded:,.1f} MB/s, {raw:,.1f} MB/s before compression",
        step,
        e.wait,
    )


def slots_are_few(e: Evidence, share: float) -> Verdict:
    """Actors wait this ``share`` of their time for slots, while the learner waits for data."""
    slots = int(e.option("transport", "slots", 2))
    return Verdict(
        "few_slots",
        f"slots are few: the learner waits {percent(e.wait)} for data while actors wait for room",
        f"{_actors(e)} wait {percent(share)} for a slot",
        f"lend each actor more: transport.slots={slots + 1}",
        e.wait,
    )


def actor_is_slow(e: Evidence, share: float) -> Verdict:
    """Actors spend this ``share``, most of their time, outside the environment and the network."""
    return Verdict(
        "slow_actor",
        f"actors are slow beside their games: the learner waits {percent(e.wait)} for data",
        f"{_actors(e)} spend {percent(share)} in write, process and other",
        more_actors(e, "more actors.envs spread what a step costs; the trace shows where it goes"),
        e.wait,
    )


def more_actors(e: Evidence, otherwise: str) -> str:
    """Returns how many more actors would feed the learner, and where there are cores for them.

    ``otherwise`` is further advice, which ends the sentence.
    """
    each, ranks = e.actor_steps_per_s, len(e.learners)
    if not each:
        return f"no unroll was finished in the window: profile for longer; {otherwise}"

    # The missing actors of this learner, and as many of each other one.
    supply = each * len(e.actors)
    more = max(1, math.ceil((e.wanted_steps_per_s - supply) / each)) * ranks
    room, now = e.room_for_actors, len(e.all_actors)
    feed = f"{more} more actor{'s' if more > 1 else ''} would feed it"
    if room >= more:
        return f"{feed}: actors.count={now + more}; {otherwise}"
    if room:
        cores = "which has idle cores"
        if e.idle_cores < e.free_cores:
            cores = "beside the other programs that keep its cores busy"
        return (
            f"{feed}: {room} on this host, {cores} (actors.count={now + room}), and "
            f"{more - room} on other hosts (`penstock actor`); {otherwise}"
        )
    full = f"{e.cores - e.idle_cores:.1f} of {e.cores:g} cores are busy"

    if now >= e.most_actors:
        full = f"{now} play, as many as actors.count=auto starts at most"
    return (
        f"{feed}, but not on this host, where {full}: start them elsewhere (`penstock actor`); "
        f"{otherwise}"
    )


def _actors(e: Evidence) -> str:
    return f"{len(e.actors)} actors" if len(e.actors) > 1 else "1 actor"


WORK: dict[Kind, Callable[[Evidence, float], Verdict]] = {
    "slow_environment": environment_is_slow,
    "slow_inference": inference_is_slow,
    "slow_wire": wire_is_slow,
    "few_slots": slots_are_few,
    "slow_actor": actor_is_slow,
}
LIMITED_OTHERWISE: tuple[Kind, ...] = ("filling", "slow_gather", "few_slots", "empty")
"""Causes by which the learner would wait at any `replay.samples_per_insert`."""
CAUSES: tuple[Rule, ...] = (
    replay_is_filling,
    feeder_is_busy,
    connector_is_busy,
    one_actor_is_slow,
    actors_elsewhere,
    plays_and_trains_in_turns,
    actors_work,
)
