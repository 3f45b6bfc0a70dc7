"""Games that are recorded, and what their slots must hold by the games' own logs.

`RecordedGames` plays a service at random: several rows of a seat in one turn, faults, seats and
games that leave, few lent slots, weights that change. `expected_slots` makes the slots again, from
the log of one seat's place and the rules of docs/games-protocol.md, with lists and one row at a
time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock import LoadedPolicy
from penstock.algos.registry import algorithm
from penstock.algos.samples import slot_spec
from penstock.core.params import Float32, Stamp
from penstock.core.specs import HEADER
from penstock.serving.game_recorder import GameRecorder
from penstock.serving.messages import Hello
from penstock.serving.seats import StepRows
from penstock.serving.service import Service
from penstock.transport.shm.store import SlotStore
from served_games import random_policy

FIRST, TERMINATED, TRUNCATED, LEAVES = 1, 2, 4, 8
Array = npt.NDArray[Any]
GENERATION = 3
FIRST_ACTOR = 1 << 32
INCARNATION = 5


@dataclass
class First:
    """An episode began."""

    obs: Array


@dataclass
class Act:
    """An action arrived."""

    action: Array
    version: int


@dataclass
class Outcome:
    """What came of the last action; ``obs`` is None if the seat saw nothing more."""

    reward: float
    terminated: bool
    truncated: bool
    obs: Array | None


class Fault:
    """The seat must begin anew."""


class Left:
    """The seat, or its game, has gone."""


Event = First | Act | Outcome | Fault | Left


@dataclass
class Row:
    """A row of a slot; those that are no decisions have zeros."""

    decision: Act | None = None
    outcome: Outcome | None = None
    episode_return: float = 0.0
    episode_length: int = 0
    discounted_return: float = 0.0
    is_last_look: bool = False
    """Whether the policy has decided on the last observation of a truncated episode here."""
    repeats: bool = False
    """Whether it is the rest of a slot that was flushed."""


@dataclass
class ExpectedSlot:
    obs: list[Array]
    rows: list[Row]


def expected_slots(events: list[Event], unroll: int, discount: float = 1.0) -> list[ExpectedSlot]:
    """The slots of one place, and at the end those rows that make no whole slot are missing."""
    slots: list[ExpectedSlot] = []
    current = ExpectedSlot([], [])
    status = "new"
    row = Row()
    total, length, discounted = 0.0, 0, 0.0

    def close(next_obs: Array) -> None:
        nonlocal current, row
        current.rows.append(row)
        current.obs.append(next_obs)
        row = Row()
        if len(current.rows) == unroll:
            slots.append(current)
            current = ExpectedSlot([next_obs], [])

    for event in events:
        match event:
            case First(obs):
                if status == "new":
                    current.obs = [obs]
                elif status == "begun":
                    current.obs[-1] = obs
                else:
                    close(obs)
                status = "begun"
                total, length, discounted = 0.0, 0, 0.0
            case Act():
                row.decision = event
                status = "decided"
            case Outcome(reward, terminated, truncated, seen) if status == "decided":
                total += reward
                length += 1
                discounted = discount * discounted + reward
                row.outcome = event
                row.discounted_return = discounted
                row.episode_return, row.episode_length = total, length
                close(current.obs[-1] if seen is None else seen)
                status = "over" if terminated or truncated else "shown"
                row.is_last_look = truncated and not terminated
            case Fault() | Left():
                if status in ("shown", "decided"):
                    status = "over"
                if isinstance(event, Left) and any(row.outcome for row in current.rows):
                    template = row
                    while current.rows:
                        close(current.obs[-1])
                        row = Row(template.decision, is_last_look=template.is_last_look)
                        row.repeats = True
                    current = ExpectedSlot([], [])
                    row = Row()
                    status = "new"
    return slots


class Published(NamedTuple):
    """A slot that a learner got."""

    header: npt.NDArray[np.void]
    columns: dict[str, Array]


@dataclass
class Seat:
    """What a client knows of one of its seats."""

    place: int
    phase: str = "idle"
    """As of docs/games-protocol.md: idle, acting, or waiting for an action."""


@dataclass
class Game:
    number: int
    places: range
    seats: list[Seat] = field(default_factory=list)


class Message(NamedTuple):
    """One row of a STEP."""

    game: Game
    seat: Seat
    flags: int
    reward: float
    obs: Any
    is_bad: bool = False
    """Whether other bytes are sent, which are no observation."""
    step: int = 0
    """Number of the STEP among those of the game."""


def recorded_policy(folder: Path, target: str, *overrides: str) -> LoadedPolicy:
    """A policy of random weights that samples, in slots of one environment."""
    policy = random_policy(folder, target, "actors.envs=1", *overrides)
    policy.sample = True
    return policy


class RecordedGames:
    """A service with a recorder, the learner that takes its slots, and random games."""

    def __init__(
        self,
        policy: LoadedPolicy,
        seed: int,
        games: int,
        *,
        store: SlotStore | None = None,
        slots: int = 12,
        faults: float = 0.03,
        leaves: float = 0.01,
        ends: float = 0.12,
        changes_weights: bool = True,
    ) -> None:
        self.policy = policy
        self.spec = slot_spec(policy.config, policy.info)
        algo = policy.config.algo
        self.store = store or SlotStore(self.spec, slots, shared=False)
        writer = self.store.local_writer(self.store.open_lane(want=slots))
        self.recorder = GameRecorder(
            policy.config,
            self.spec,
            4096,
            writer,
            first_actor=FIRST_ACTOR,
            incarnation=INCARNATION,
            process=partial(algorithm(algo).process, algo),
        )
        self.service = Service(policy, recorder=self.recorder)
        self.weights: list[Float32] = [policy._weights]
        """By version."""
        self.logs: dict[int, list[Event]] = defaultdict(list)
        """What happened, by place."""
        self.published: dict[int, list[Published]] = defaultdict(list)
        """The slots of each place."""
        self.held_turns = 0
        self._seats: dict[int, Seat] = {}
        self.seen: Counter[str] = Counter()
        self._rng = np.random.default_rng(seed)
        self._faults, self._leaves, self._ends = faults, leaves, ends
        self._changes_weights = changes_weights
        self._single = policy.observation_space
        self._single.seed(seed)
        self._number = 0
        self._turns = 0
        self.service.load(self.weights[0], Stamp(GENERATION, 0))
        self.games = [self.join() for _ in range(games)]

    # ------------------------------------------------------------------------- the clients

    def join(self) -> Game:
        seats = int(self._rng.integers(1, 4))
        places = self.service.join(Hello(seats=seats), self._number)
        game = Game(self._number, places, [Seat(place) for place in places])
        self._seats |= {seat.place: seat for seat in game.seats}
        self._number += 1
        return game

    def leave(self, game: Game) -> None:
        self.service.leave(game.places)
        for seat in game.seats:
            self.logs[seat.place].append(Left())
            del self._seats[seat.place]
        self.seen["game left"] += 1

    def turn(self) -> None:
        """One turn: rows of some games, their actions, and a learner that reads now and then."""
        rng = self._rng
        for i, game in enumerate(self.games):
            if rng.random() < self._leaves:
                self.leave(game)
                self.games[i] = self.join()

        messages = [message for game in self.games for message in self._messages(game)]
        parts = [messages]
        if rng.random() < 0.3:
            cut = int(rng.integers(0, len(messages) + 1))
            parts = [messages[:cut], messages[cut:]]
        for part in parts:
            if part:
                self.take(part)

        self.answer()
        if rng.random() < 0.2:
            self.learn()
        self._turns += 1
        if self._changes_weights and self._turns % 9 == 0:
            self.load()

    def load(self) -> None:
        noise = self._rng.standard_normal(self.weights[0].size, np.float32)
        self.weights.append(self.weights[-1] + 0.05 * noise)
        self.service.load(self.weights[-1], Stamp(GENERATION, len(self.weights) - 1))

    def learn(self) -> None:
        """Take the slots that were published, lend their memory again, and publish what waits."""
        self.store.collect()
        while self.store.ready:
            slot = self.store.slots[self.store.ready.popleft()]
            columns = {name: array[:, 0].copy() for name, array in self._views(slot).items()}
            place = int(slot.header["actor"]) - FIRST_ACTOR
            self.published[place].append(Published(slot.header.copy(), columns))
            self.store.release(slot.index)
        self.recorder.publish_waiting()

    def _views(self, slot: Any) -> dict[str, Array]:
        """Columns with the axis of environments second, also those of a whole slot."""
        whole = {column.name for column in self.spec.columns if column.rows == "slot"}
        return {
            name: array[None] if name in whole else array for name, array in slot.columns.items()
        }

    def finish(self) -> None:
        """All games leave, and the learner reads what is left."""
        for game in self.games:
            self.leave(game)
        self.games = []
        while self.recorder.held or self.store.collect():
            self.learn()
        assert self.recorder.playing == 0

    def _messages(self, game: Game) -> list[Message]:
        """The rows that a game sends in one turn."""
        messages = []
        for seat in game.seats:
            steps = 0
            for flags, reward, kind in self._rows(seat):
                obs = self._single.sample()
                if isinstance(obs, dict) and "action_mask" in obs:
                    obs["action_mask"][1] = 1
                if kind == "repeated":
                    steps -= 1
                is_bad = kind == "bad observation"
                messages.append(Message(game, seat, flags, reward, obs, is_bad, steps))
                steps += 1
        # The STEPs of a game in their order, the seats of each in any.
        self._rng.shuffle(messages)
        return sorted(messages, key=lambda message: message.step)

    def _rows(self, seat: Seat) -> list[tuple[int, float, str]]:
        """Flags, reward and kind of each row that a seat sends in a turn."""
        rng = self._rng
        reward = float(np.float32(rng.standard_normal()))
        is_at_fault = rng.random() < self._faults
        if seat.phase == "waiting":
            return [(0, reward, "early")] if is_at_fault else []
        if rng.random() < 0.25:  # slow, or another one's turn
            return []
        if is_at_fault:
            return self._fault(seat, reward)
        begins = (FIRST, np.nan, "")
        if seat.phase == "idle":
            leaves = LEAVES | int(rng.choice([0, TERMINATED]))
            return [(leaves, reward, "unread")] if rng.random() < 0.1 else [begins]

        if rng.random() < 0.03:  # begins anew
            return [begins]
        if rng.random() < 0.03:
            rows = [(LEAVES, reward, "unread")]
            return [*rows, begins] if rng.random() < 0.5 else rows
        if rng.random() > self._ends:
            return [(0, reward, "")]
        end = int(rng.choice([TERMINATED, TRUNCATED, TERMINATED | TRUNCATED]))
        style = rng.random()
        if style < 0.4:
            return [(end, reward, "")]
        if style < 0.5:
            return [(end | LEAVES, reward, "unread")]
        if style < 0.6:
            return [(end | LEAVES, reward, "unread"), begins]
        if style < 0.7:
            return [(end, reward, ""), (LEAVES, 0.0, "unread"), begins]
        return [(end, reward, ""), begins]

    def _fault(self, seat: Seat, reward: float) -> list[tuple[int, float, str]]:
        """Rows the last of which is at fault."""
        if seat.phase == "idle":
            first = (FIRST, 0.0, "bad observation")
            return [[(0, 0.0, "not begun")], [first]][int(self._rng.integers(2))]
        kinds: list[list[tuple[int, float, str]]] = [
            [(0, np.nan, "reward")],
            [(64, reward, "flags")],
            [(FIRST | TERMINATED, reward, "first and last")],
            [(0, reward, "bad observation")],
            [(TRUNCATED, reward, "bad observation")],
            [(0, reward, ""), (0, reward, "repeated")],
            [(TERMINATED, reward, ""), (FIRST, 0.0, ""), (0, reward, "early")],
        ]
        return kinds[int(self._rng.integers(len(kinds)))]

    # ------------------------------------------------------------------------- the service

    def take(self, messages: list[Message]) -> None:
        """Give rows to the service, and log what each client knows of them."""
        layout = self.service.observations.layout
        samples = [message.obs for message in messages]
        rows = np.zeros((len(messages), layout.nbytes), np.uint8)
        layout.write(_stacked(samples), rows)
        packed, _ = self.service.observations.read(rows.copy())
        for i, message in enumerate(messages):
            if message.is_bad:
                rows[i] = 255
        numbers = [message.game.number * 8 + message.step for message in messages]
        step = StepRows(
            np.array([message.seat.place for message in messages]),
            flags=np.array([message.flags for message in messages], np.uint8),
            reward=np.array([message.reward for message in messages], np.float32),
            message=np.array(numbers),
        )
        faults = {fault.row for fault in self.service.take(step, rows)}

        for i, message in enumerate(messages):
            seat, flags = message.seat, message.flags
            log = self.logs[seat.place]
            if i in faults:
                log.append(Fault())
                seat.phase = "idle"
                self.seen["fault"] += 1
                continue
            if flags & FIRST:
                log.append(First(packed[i].copy()))
                seat.phase = "waiting"
                continue
            if not flags & LEAVES or flags & (TERMINATED | TRUNCATED):
                obs = None if flags & LEAVES else packed[i].copy()
                ends = bool(flags & TERMINATED), bool(flags & TRUNCATED)
                log.append(Outcome(message.reward, *ends, obs))
            seat.phase = "idle" if flags else "waiting"
            if flags & LEAVES:
                log.append(Left())
                self.seen["seat left"] += 1

    def answer(self) -> None:
        """Decide, and log the actions."""
        self.held_turns += self.recorder.held
        decisions = self.service.decide()
        if decisions is None:
            return
        actions = self.service.actions.read(decisions.actions)
        version = len(self.weights) - 1
        for place, action in zip(decisions.seat.tolist(), actions, strict=True):
            assert self._seats[place].phase == "waiting"
            self._seats[place].phase = "acting"
            self.logs[place].append(Act(np.array(action), version))


def _stacked(samples: list[Any]) -> Any:
    """Observations of any space as one batch."""
    first = samples[0]
    if isinstance(first, dict):
        return {key: _stacked([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple):
        return tuple(_stacked([*column]) for column in zip(*samples, strict=True))
    return np.stack(samples)


def check_headers(slots: list[Published], place: int) -> None:
    """The headers of one stream follow each other."""
    produced = 0
    for number, slot in enumerate(slots):
        header, columns = slot
        assert header.dtype == HEADER
        alive = columns["alive"]
        produced += int(alive.sum())
        assert header["actor"] == FIRST_ACTOR + place
        assert header["incarnation"] == INCARNATION
        assert header["generation"] == GENERATION
        assert header["sequence"] == number
        assert header["steps"] == alive.sum()
        assert header["produced_steps"] == produced
        assert header["rows"] == 0
        assert header["started_s"] <= header["published_s"]
        if alive.any():
            assert header["version"] == columns["policy_version"][alive].min()
