"""Rules for a learner that waits for data. They find one cause: the stage that limits the flow.

The stages are checked from the learner towards the actors, against the direction of samples. The
first stage that is always busy is the limit; the stages before it only wait for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from penstock.profiling.evidence import (
    FAIR_SHARE,
    Evidence,
    ThreadTrial,
    largest_part,
    percent,
)
from penstock.profiling.rule import (
    BUSY,
    ENV_WAITS,
    EXPLAINING_SHARE,
    HELPFUL_GAIN,
    SIGNIFICANT_COST,
    SIMILAR_GAIN,
    SLOW_PACE,
    Kind,
    Rule,
    Verdict,
    nothing_to_judge,
)

# A window that begins while replay fills is advised to be so much longer, to see training.
AFTER_FILLING_S = 30
# So many threads are advised at most where no trial has shown how many help.
UNTRIED_THREADS = 16


def waits_for_data(evidence: Evidence) -> Verdict | None:
    """The learner has nothing to train on."""
    if evidence.wait < SIGNIFICANT_COST:
        return None

    # The last cause always applies.
    verdict = next(verdict for cause in CAUSES if (verdict := cause(evidence)) is not None)
    ratio = evidence.option("replay", "samples_per_insert", None)
    if not evidence.from_replay or ratio is None or verdict.kind in LIMITED_OTHERWISE:
        return verdict
    return replace(
        verdict,
        reason=f"{verdict.reason}; replay.samples_per_insert={ratio:g} is reached, so nothing is "
        "drawn before more is played",
        next_step=f"{verdict.next_step}; or draw each step more often: a larger "
        "replay.samples_per_insert",
    )


def replay_is_filling(evidence: Evidence) -> Verdict | None:
    """Nothing is drawn from replay before it holds enough."""
    missing = evidence.missing_in_replay
    rate = float(evidence.flow.get("produced_steps_per_s") or 0.0)
    if not missing or not rate:
        return None

    size = float(evidence.flow["replay_size"])
    remaining_s = math.ceil(missing / rate)
    return Verdict(
        kind="filling",
        finding=f"replay is still filling: training begins {missing:,.0f} steps from now",
        reason=f"it holds {size:,.0f} of the {size + missing:,.0f} steps that replay.min_size asks "
        f"for; actors bring {rate:,.0f} a second, which takes {remaining_s:,} s more",
        next_step="begin sooner with a smaller replay.min_size, or profile the training after that "
        f"with --seconds {remaining_s + AFTER_FILLING_S}",
        cost=evidence.wait,
    )


def feeder_is_busy(evidence: Evidence) -> Verdict | None:
    """The thread that gathers cannot keep up with what arrives."""
    if evidence.feeder_busy < BUSY:
        return None
    return gather_is_slow(evidence, evidence.wait)


def gather_is_slow(evidence: Evidence, share: float) -> Verdict:
    """The learner waits this ``share`` of its time for the thread that gathers."""
    if evidence.from_replay:
        smaller = (
            "draw less: a smaller replay.batch_size, smaller observations, transport.frame_stack "
            "for stacked frames, or replay.prioritized=false"
        )
    else:
        smaller = "make samples smaller (uint8 observations, fewer recorded values)"

    if evidence.feeder_busy:
        reason = f"the feeder thread gathers {percent(evidence.feeder_busy)} of the time"
    else:
        reason = "the feeder thread gathers batches ahead, and is late"

    more_learners = len(evidence.learners) + 1
    return Verdict(
        kind="slow_gather",
        finding=f"gathering is slow: the learner waits {percent(share)} for it",
        reason=reason,
        next_step=f"{smaller}; or spread them over learner.count={more_learners} learners",
        cost=share,
    )


def connector_is_busy(evidence: Evidence) -> Verdict | None:
    """The process that receives cannot keep up."""
    if not evidence.connectors:
        return None
    connector = min(evidence.connectors, key=lambda role: role["ledger"].get("wait", 0.0))
    ledger = connector["ledger"]
    busy = 1.0 - ledger.get("wait", 0.0)
    if not ledger or busy < BUSY:
        return None

    part, share = largest_part({"ledger": {**ledger, "wait": 0.0}})
    if evidence.games_play:
        return Verdict(
            kind="slow_wire",
            finding=f"the service of the games is busy: the learner waits {percent(evidence.wait)} "
            "for it",
            reason=f"{connector['name']} is busy {percent(busy)} of the time, {percent(share)} in "
            f"{part}",
            next_step="let each connection have more seats, so that a message brings more rows; "
            f"learner.count={len(evidence.learners) + 1} brings another service, at a port of its "
            "own",
            cost=evidence.wait,
        )

    next_step = f"learner.count={len(evidence.learners) + 1} brings another connector"
    advice = {
        "decompress": "send samples as they are, if the network carries it: transport.codec=none",
        "receive": "send fewer and larger messages: a larger actors.unroll or actors.envs",
        "process": "the algorithm's work on a slot is the limit: look at its process()",
    }
    if part in advice:
        next_step = f"{advice[part]}; {next_step}"
    return Verdict(
        kind="slow_wire",
        finding=f"the wire is slow: the learner waits {percent(evidence.wait)} for the connector",
        reason=f"{connector['name']} is busy {percent(busy)} of the time, {percent(share)} in "
        f"{part}",
        next_step=next_step,
        cost=evidence.wait,
    )


def one_actor_is_slow(evidence: Evidence) -> Verdict | None:
    """One of several actors makes far less than the others."""
    slowest = evidence.slowest()
    if slowest is None:
        return None

    # The share of all actors' steps that it would make at the others' pace, and does not.
    pace = slowest.pace
    others_pace = slowest.others_pace
    lost_share = (others_pace - pace) / max(others_pace * len(evidence.actors), 1e-9)
    if pace >= SLOW_PACE * others_pace or lost_share < EXPLAINING_SHARE * evidence.wait:
        return None

    name = slowest.actor["name"]
    part, share = largest_part(slowest.actor)
    cost = min(evidence.wait, lost_share)
    return Verdict(
        kind="straggler",
        finding=f"{name} is slow, which costs {percent(cost)} of the throughput",
        reason=f"the learner waits {percent(evidence.wait)} for data; {name} plays {pace:,.0f} "
        f"steps/s and the others {others_pace:,.0f}; it spends {percent(share)} in {part}",
        next_step=f"look at {name}: its host, what else runs there, and its games (`penstock "
        "stacks RUN` shows where it is)",
        cost=cost,
    )


def actors_elsewhere(evidence: Evidence) -> Verdict | None:
    """The profile contains no actor of this learner."""
    wait = evidence.wait
    if evidence.actors:
        return None
    if not evidence.connectors:
        return nothing_to_judge(
            "no actor plays", "see why actors end (logs/ in the run's folder)", cost=wait
        )
    if evidence.games_play:
        return _games_are_slow(evidence)
    return Verdict(
        kind="starved",
        finding=f"actors of other hosts are too slow: the learner waits {percent(wait)} for data",
        reason="the connector waits for them too, and none is on this host",
        next_step="start more of them (`penstock actor`), or profile one of those hosts",
        cost=wait,
    )


def _games_are_slow(evidence: Evidence) -> Verdict:
    """The learner waits for games, and so does the process that serves them."""
    idle = max(role["ledger"].get("wait", 0.0) for role in evidence.connectors)
    return Verdict(
        kind="starved",
        finding=f"the games are the limit: the learner waits {percent(evidence.wait)} for data",
        reason=f"the service that decides for them waits for them too, {percent(idle)} of its time",
        next_step="let more of them connect, or with more seats, or let each step sooner after its "
        "actions have come",
        cost=evidence.wait,
    )


def plays_and_trains_in_turns(evidence: Evidence) -> Verdict | None:
    """Actors may not play the next batch early enough."""
    actors_wait = evidence.actors_share("wait")
    if not evidence.lent_by_batch or actors_wait < SIGNIFICANT_COST:
        return None  # actors that do not wait are busy all the time

    # The next batch is lent so many updates before the end of this one, or at any time before.
    updates = evidence.updates_of_batch
    max_lag = int(evidence.option("transport", "max_policy_lag", 0))
    compute = max(evidence.share("compute"), SIGNIFICANT_COST)
    advised_lag = max_lag + math.ceil(evidence.wait / compute * updates)
    if advised_lag >= updates:  # a batch ahead
        advised_lag = max(1000, int(evidence.option("transport", "least_lag", 0)))

    when = "after this one"
    if max_lag:
        when = f"when {max_lag} of the {updates} updates of this one are left"
    wait = percent(evidence.wait)
    return Verdict(
        kind="turns",
        finding=f"actors and learner take turns: the learner waits {wait} for data",
        reason=f"{_actors(evidence)} may play the next batch only {when}",
        next_step="let them begin earlier, with older weights: "
        f"transport.max_policy_lag={advised_lag}",
        cost=evidence.wait,
    )


def actors_work(evidence: Evidence) -> Verdict:
    """The learner waits for what its actors spend most of their time in."""
    # With a connector, an actor waits for its turn to send, otherwise for a slot of the learner.
    wire_parts = ["compress", "send"]
    slot_parts = []
    if evidence.connectors:
        wire_parts.append("wait")
    else:
        slot_parts.append("wait")

    shares: dict[Kind, float] = {
        "slow_environment": evidence.actors_share("step"),
        "slow_inference": evidence.actors_share("infer"),
        "slow_wire": evidence.actors_share(*wire_parts),
        "few_slots": evidence.actors_share(*slot_parts),
        "slow_actor": evidence.actors_share("write", "process", "other"),
    }
    kind = max(shares, key=lambda name: shares[name])
    return WORK[kind](evidence, shares[kind])


def environment_is_slow(evidence: Evidence, share: float) -> Verdict:
    """Actors spend this ``share``, most of their time, in steps of the environment."""
    if evidence.env_waits > ENV_WAITS * share or helpful_threads(evidence) is not None:
        return environment_waits(evidence, share)
    return Verdict(
        kind="slow_environment",
        finding=f"the environment is slow: the learner waits {percent(evidence.wait)} for data",
        reason=f"{_actors_do('spend', evidence)} {percent(share)} in env.step",
        next_step=more_actors(evidence, "a faster environment helps"),
        cost=evidence.wait,
    )


def environment_waits(evidence: Evidence, share: float) -> Verdict:
    """In env.step, which takes this ``share`` of their time, actors wait for something outside."""
    idle = percent(evidence.env_without_computing)
    return Verdict(
        kind="waiting_environment",
        finding=f"the environment waits: the learner waits {percent(evidence.wait)} for data",
        reason=f"{_actors_do('spend', evidence)} {percent(share)} in env.step, {idle} without "
        "computing: a step waits for something outside of the actor, such as a sleep, a socket or "
        "another program",
        next_step=_shorter_wait(evidence),
        cost=evidence.wait,
    )


def _shorter_wait(evidence: Evidence) -> str:
    """Returns how more steps are made of an environment that waits.

    That is by threads, where a trial has shown that they help, or else by actors.
    """
    trials = evidence.thread_trials
    if trials is None:
        return _untried_threads(evidence)
    if not trials:
        advice = more_actors(
            evidence, "more actors.envs help too, if its step takes no longer with them"
        )
        return f"{advice}; actors.env_threads does nothing for its own vector form"

    present = trials[0]
    trial_text = (
        f"in a trial, one actor made {present.steps_per_s:,.0f} steps/s with {present.threads} of "
        "actors.env_threads"
    )
    best = helpful_threads(evidence)
    if best is not None:
        return (
            f"step its environments side by side: actors.env_threads={best.threads}; {trial_text} "
            f"and {best.steps_per_s:,.0f} with {best.threads}"
        )
    if len(trials) == 1:
        return more_actors(evidence, "each environment of an actor has a thread already")
    fastest = max(trials, key=lambda trial: trial.steps_per_s)
    return more_actors(
        evidence, f"{trial_text} and {fastest.steps_per_s:,.0f} with {fastest.threads}"
    )


def _untried_threads(evidence: Evidence) -> str:
    """Returns the advice where no trial was made: the page has no environment at hand."""
    envs = evidence.option("actors", "envs", 1)
    threads = evidence.option("actors", "env_threads", 1)
    if not isinstance(envs, int) or threads >= envs:
        return more_actors(evidence, "a faster environment helps")
    return (
        f"step its environments side by side: actors.env_threads={min(envs, UNTRIED_THREADS)}, if "
        "they are single ones, Atari's or EnvPool's; `penstock profile` on one host tries which "
        "number helps"
    )


def helpful_threads(evidence: Evidence) -> ThreadTrial | None:
    """Returns the trial of the smallest number of threads that is about as good as the best.

    None where none is better than that of the run, by far, or nothing was tried. The gain of
    threads is that of the trial, as far as there are cores for the actors, the programs that they
    have started, and the learner.
    """
    trials = evidence.thread_trials
    if not trials:
        return None
    present = trials[0]
    steps_per_s = evidence.actor_steps_per_s * len(evidence.actors) * len(evidence.learners)
    # What the trial had of the cores, the run can have.
    used_cores = steps_per_s * (present.cpu_s + evidence.learner_cpu_s)
    usable_cores = max(
        evidence.idle_cores + used_cores,
        FAIR_SHARE * evidence.cores,
        *(trial.cpu for trial in trials),
    )
    usable_cores = min(usable_cores, evidence.cores)

    def gain(trial: ThreadTrial) -> float:
        """Returns by what factor the rate of the run would grow."""
        trial_gain = trial.steps_per_s / present.steps_per_s
        if not steps_per_s:
            return trial_gain
        carried_steps_per_s = usable_cores / max(trial.cpu_s + evidence.learner_cpu_s, 1e-9)
        return min(trial_gain, carried_steps_per_s / steps_per_s)

    best_gain = max(map(gain, trials))
    if best_gain < HELPFUL_GAIN:
        return None
    return next(trial for trial in trials if SIMILAR_GAIN * gain(trial) >= best_gain)


def inference_is_slow(evidence: Evidence, share: float) -> Verdict:
    """Actors spend this ``share``, most of their time, in the policy's network."""
    cheaper = "a smaller network helps, and more actors.envs make a step's share of it cheaper"
    if evidence.option("actors", "precision", "auto") == "fp32":
        cheaper = f"actors.precision=auto takes the faster format; {cheaper}"
    return Verdict(
        kind="slow_inference",
        finding=f"inference is slow: the learner waits {percent(evidence.wait)} for data",
        reason=f"{_actors_do('spend', evidence)} {percent(share)} in the policy's network",
        next_step=more_actors(evidence, cheaper),
        cost=evidence.wait,
    )


def wire_is_slow(evidence: Evidence, share: float) -> Verdict:
    """Actors spend this ``share``, most of their time, on sending or waiting to send."""
    compress = evidence.actors_share("compress")
    if compress > share / 2:
        next_step = "send samples as they are, if the network carries it: transport.codec=none"
    elif evidence.option("transport", "codec", "auto") == "none":
        next_step = "send less: transport.codec=auto"
    else:
        slots = int(evidence.option("transport", "slots", 2))
        next_step = (
            f"keep more on its way, transport.slots={slots + 1}; if the network is full, make "
            "observations smaller (uint8), or play on the learner's host"
        )

    coded_mb_per_s = _received_mb_per_s(evidence, "coded_nbytes_per_s")
    raw_mb_per_s = _received_mb_per_s(evidence, "raw_nbytes_per_s")
    return Verdict(
        kind="slow_wire",
        finding=f"the wire is slow: the learner waits {percent(evidence.wait)} for data",
        reason=f"{_actors_do('spend', evidence)} {percent(share)} on sending ({percent(compress)} "
        f"compressing); the wire carries {coded_mb_per_s:,.1f} MB/s, {raw_mb_per_s:,.1f} MB/s "
        "before compression",
        next_step=next_step,
        cost=evidence.wait,
    )


def _received_mb_per_s(evidence: Evidence, name: str) -> float:
    """Returns a rate of all connectors in MB/s, which is in their evidence in bytes per second."""
    return sum(float(connector.get(name) or 0.0) for connector in evidence.connectors) / 1e6


def slots_are_few(evidence: Evidence, share: float) -> Verdict:
    """Actors wait this ``share`` of their time for slots, while the learner waits for data."""
    slots = int(evidence.option("transport", "slots", 2))
    return Verdict(
        kind="few_slots",
        finding=f"slots are few: the learner waits {percent(evidence.wait)} for data while actors "
        "wait for room",
        reason=f"{_actors_do('wait', evidence)} {percent(share)} for a slot",
        next_step=f"lend each actor more: transport.slots={slots + 1}",
        cost=evidence.wait,
    )


def actor_is_slow(evidence: Evidence, share: float) -> Verdict:
    """Actors spend this ``share``, most of their time, outside the environment and the network."""
    wait = percent(evidence.wait)
    return Verdict(
        kind="slow_actor",
        finding=f"actors are slow beside their games: the learner waits {wait} for data",
        reason=f"{_actors_do('spend', evidence)} {percent(share)} in write, process and other",
        next_step=more_actors(
            evidence, "more actors.envs spread what a step costs; the trace shows where it goes"
        ),
        cost=evidence.wait,
    )


def more_actors(evidence: Evidence, otherwise: str) -> str:
    """Returns how many more actors would feed the learner, and where there are cores for them.

    ``otherwise`` is further advice, which ends the sentence.
    """
    actor_rate = evidence.actor_steps_per_s
    if not actor_rate:
        return f"no unroll was finished in the window: profile for longer; {otherwise}"

    # The missing actors of this learner, and as many of each other one.
    rate = actor_rate * len(evidence.actors)
    missing = max(1, math.ceil((evidence.wanted_steps_per_s - rate) / actor_rate))
    missing *= len(evidence.learners)
    plural = "s" if missing > 1 else ""
    advice = f"{missing} more actor{plural} would feed it"

    room = evidence.room_for_actors
    present = len(evidence.all_actors)
    if room >= missing:
        return f"{advice}: actors.count={present + missing}; {otherwise}"
    if room:
        cores = "which has idle cores"
        if evidence.idle_cores < evidence.free_cores:
            cores = "beside the other programs that keep its cores busy"
        return (
            f"{advice}: {room} on this host, {cores} (actors.count={present + room}), and "
            f"{missing - room} on other hosts (`penstock actor`); {otherwise}"
        )

    if present >= evidence.most_actors:
        why_full = f"{present} play, as many as actors.count=auto starts at most"
    else:
        busy_cores = evidence.cores - evidence.idle_cores
        why_full = f"{busy_cores:.1f} of {evidence.cores:g} cores are busy"
    return (
        f"{advice}, but not on this host, where {why_full}: start them elsewhere (`penstock "
        f"actor`); {otherwise}"
    )


def _actors(evidence: Evidence) -> str:
    """Returns the number of the learner's actors as text."""
    count = len(evidence.actors)
    return f"{count} actors" if count > 1 else "1 actor"


def _actors_do(verb: str, evidence: Evidence) -> str:
    """Returns the number of the learner's actors with ``verb`` as text, such as "1 actor waits"."""
    ending = "" if len(evidence.actors) > 1 else "s"
    return f"{_actors(evidence)} {verb}{ending}"


# The verdict on actors that spend most of their time in one kind of work, by the verdict's kind.
WORK: dict[Kind, Callable[[Evidence, float], Verdict]] = {
    "slow_environment": environment_is_slow,
    "slow_inference": inference_is_slow,
    "slow_wire": wire_is_slow,
    "few_slots": slots_are_few,
    "slow_actor": actor_is_slow,
}
LIMITED_OTHERWISE: tuple[Kind, ...] = ("filling", "slow_gather", "few_slots", "empty")
"""Causes by which the learner would wait at any `replay.samples_per_insert`."""
# From the learner towards the actors; the first cause that applies is named.
CAUSES: tuple[Rule, ...] = (
    replay_is_filling,
    feeder_is_busy,
    connector_is_busy,
    one_actor_is_slow,
    actors_elsewhere,
    plays_and_trains_in_turns,
    actors_work,
)
