"""Duels that games play with opponents in some seats, against the games' own logs."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from penstock.algos.registry import algorithm
from penstock.algos.samples import slot_spec
from penstock.algos.slots import UnrollSummary
from penstock.core.draws import NO_DRAW, draw_number
from penstock.core.params import Float32, ParamLayout, Stamp
from penstock.serving.game_recorder import GameRecorder
from penstock.serving.messages import Hello, MessageError
from penstock.serving.opponents import make_opponents
from penstock.serving.seats import StepRows
from penstock.serving.service import Service
from penstock.transport.shm.store import SlotStore
from penstock.transport.shm.weights_board import WeightsBoard, board_of
from served_games import random_policy

FIRST, TERMINATED, TRUNCATED, LEAVES = 1, 2, 4, 8
CHAIRS = 2
SURE = 50.0  # a logit beside which all others have no probability


@dataclass
class Decision:
    """What a client knows of one action."""

    episode: Episode
    seat: int
    action: int = -1
    reward: float | None = None
    ended: bool = False


@dataclass
class Episode:
    """An episode of one duel, by its client."""

    decisions: tuple[list[Decision], list[Decision]] = field(default_factory=lambda: ([], []))
    returns: list[float] = field(default_factory=lambda: [0.0, 0.0])
    length: int = 0
    has_result: bool = False


@dataclass
class Duel:
    """One game of a connection."""

    episode: Episode | None = None


@dataclass
class Connection:
    number: int
    places: range
    duels: list[Duel]


class Duels:
    """A service with opponents and a recorder, and clients that play duels at random.

    What a seat sees is the number of its row, which the policies ignore.
    """

    def __init__(self, folder: Path, seed: int, *overrides: str) -> None:
        league = (f"league.chairs={CHAIRS}", *overrides)
        self.policy = random_policy(
            folder, "penstock/RockPaperScissors-v0", "actors.envs=1", "actors.unroll=8", *league
        )
        self.policy.sample = True
        config = self.policy.config
        spec = slot_spec(config, self.policy.info)
        self.store = SlotStore(spec, 6, shared=False)
        writer = self.store.local_writer(self.store.open_lane(want=6))
        self.recorder = GameRecorder(
            config,
            spec,
            400,
            writer,
            first_actor=0,
            incarnation=0,
            process=partial(algorithm(config.algo).process, config.algo),
        )
        self.opponents = make_opponents(config, self.policy.info, most_games=200, seed=seed)
        layout = ParamLayout(self.policy.batch_policy._shape.layout.entries)
        self.layout = layout
        self.boards = [
            WeightsBoard.create(layout.size, shared=False, policy_id=policy_id)
            for policy_id in range(1 + CHAIRS)
        ]
        self.choice_of: dict[int, int] = {}
        """The only choice that a draw takes, by its number."""
        self.rng = np.random.default_rng(seed)
        for chair in range(1, 1 + CHAIRS):
            self.show(chair)
        assert self.refresh()

        self.service = Service(self.policy, recorder=self.recorder, opponents=self.opponents)
        self.service.load(np.zeros(layout.size, np.float32), Stamp(1, 0))
        self.rows: list[Decision] = []
        """The decision for each number that a seat has seen."""
        self.episodes: list[Episode] = []
        self.waiting: dict[int, Decision] = {}  # by place
        self.slots: list[dict[str, npt.NDArray[Any]]] = []
        self.faults = 0
        self.numbers = 0
        self.connections = [self.join() for _ in range(8)]

    # ------------------------------------------------------------------------- the learner

    def show(self, chair: int) -> None:
        """Publish a policy that always takes one choice."""
        choice = int(self.rng.integers(3))
        flat: Float32 = np.zeros(self.layout.size, np.float32)
        [bias] = [array for array in self.layout.views(flat).values() if array.shape == (3,)]
        bias[choice] = SURE
        stamp = Stamp(9, len(self.choice_of) + 1)
        self.boards[chair].publish(flat, stamp, chair)
        self.choice_of[draw_number(stamp)] = choice

    def refresh(self) -> bool:
        return self.opponents.refresh(
            lambda out, newer_than, policy_id=0: board_of(self.boards, policy_id).read(
                out, newer_than, policy_id
            )
        )

    def learn(self) -> None:
        self.store.collect()
        while self.store.ready:
            slot = self.store.slots[self.store.ready.popleft()]
            self.slots.append({name: array.copy() for name, array in slot.columns.items()})
            self.store.release(slot.index)
        self.recorder.publish_waiting()

    # ------------------------------------------------------------------------- the games

    def join(self) -> Connection:
        duels = int(self.rng.integers(1, 4))
        places = self.service.join(Hello(seats=2 * duels, sides=(0, 1)), self.numbers)
        self.numbers += 1
        return Connection(self.numbers - 1, places, [Duel() for _ in range(duels)])

    def turn(self) -> None:
        rng = self.rng
        for i, connection in enumerate(self.connections):
            if rng.random() < 0.02:
                self.service.leave(connection.places)
                for place in connection.places:
                    self.waiting.pop(place, None)
                self.connections[i] = self.join()

        for connection in self.connections:
            for number, duel in enumerate(connection.duels):
                self.step(connection, number, duel)
        self.answer()
        if rng.random() < 0.3:
            self.learn()
        if rng.random() < 0.05:
            self.show(int(rng.integers(1, 1 + CHAIRS)))
            self.refresh()

    def step(self, connection: Connection, number: int, duel: Duel) -> None:
        """Sends one STEP of a duel, if its seats have their actions."""
        rng = self.rng
        places = [connection.places[2 * number + seat] for seat in (0, 1)]
        if self.waiting.keys() & {*places}:
            return  # a place is held, or the seat thinks
        episode = duel.episode
        if episode is None or rng.random() < 0.02:  # begins, or begins anew
            duel.episode = self.begin()
            self.send(places, duel.episode, [FIRST, FIRST], [np.nan, np.nan])
            return

        rewards = [float(reward) for reward in rng.integers(-4, 5, 2) / 4]
        if rng.random() < 0.02:
            rewards[int(rng.integers(2))] = np.nan
            self.send(places, episode, [0, 0], rewards)
            duel.episode = None
            return
        episode.length += 1
        if episode.length < 3 + len(self.episodes) % 5:
            self.send(places, episode, [0, 0], rewards)
            return
        end = int(rng.choice([TERMINATED, TRUNCATED]))
        if rng.random() < 0.05:
            end |= LEAVES
        self.send(places, episode, [end, end], rewards)
        episode.has_result = True
        duel.episode = None
        if rng.random() < 0.3:  # the next one begins in the same turn
            duel.episode = self.begin()
            self.send(places, duel.episode, [FIRST, FIRST], [0.0, 0.0])

    def begin(self) -> Episode:
        self.episodes.append(Episode())
        return self.episodes[-1]

    def send(
        self, places: list[int], episode: Episode, flags: list[int], rewards: list[float]
    ) -> None:
        seen = np.arange(len(self.rows), len(self.rows) + 2, dtype=np.float32)
        rows = np.zeros((2, self.service.observations.layout.nbytes), np.uint8)
        self.service.observations.layout.write(seen[:, None], rows)
        step = StepRows(
            np.array(places),
            flags=np.array(flags, np.uint8),
            reward=np.array(rewards, np.float32),
            message=np.zeros(2, np.int64),
        )
        faults = self.service.take(step, rows)
        self.faults += len(faults)

        for seat, place in enumerate(places):
            if flags[seat] != FIRST and not faults:
                last = episode.decisions[seat][-1]
                last.reward = rewards[seat]
                last.ended = flags[seat] > FIRST
                episode.returns[seat] += rewards[seat]
            decision = Decision(episode, seat)
            self.rows.append(decision)
            if flags[seat] in (0, FIRST) and not faults:
                episode.decisions[seat].append(decision)
                self.waiting[place] = decision

    def answer(self) -> None:
        decisions = self.service.decide()
        if decisions is None:
            return
        actions = self.service.actions.read(decisions.actions)
        for place, action in zip(decisions.seat.tolist(), actions, strict=True):
            self.waiting.pop(place).action = int(action)

    def finish(self) -> None:
        for connection in self.connections:
            self.service.leave(connection.places)
        while self.recorder.held or self.store.collect():
            self.learn()
        assert self.recorder.playing == 0


@pytest.mark.parametrize(("seed", "mirror"), [(0, 0.0), (1, 0.5), (2, 0.8)])
def test_recorded_games_and_results_are_those_of_the_clients_logs(
    tmp_path: Path, seed: int, mirror: float
) -> None:
    duels = Duels(tmp_path / "run", seed, f"league.mirror={mirror}", "algo.reward_clip=null")
    for _ in range(400):
        duels.turn()
    duels.finish()
    assert duels.faults > 50

    # Each recorded row is one decision of a log, with its action and outcome.
    recorded: dict[int, set[int]] = defaultdict(set)  # seats by episode
    draws: dict[int, set[int]] = defaultdict(set)
    counted = 0
    mirror_rows = 0
    results: Counter[tuple[int, str]] = Counter()
    for columns in duels.slots:
        for t in np.flatnonzero(columns["alive"][:, 0]):
            decision = duels.rows[int(columns["obs"][t, 0, 0])]
            assert columns["action"][t, 0] == decision.action
            assert columns["reward"][t, 0] == decision.reward
            ends = columns["terminated"][t, 0] | columns["truncated"][t, 0]
            assert ends == decision.ended
            recorded[id(decision.episode)].add(decision.seat)
            draws[id(decision.episode)].add(int(columns["opponent"][t, 0]))
            decision.reward = None  # found
            counted += 1
            mirror_rows += int(columns["opponent"][t, 0] == NO_DRAW)
        for number, games in UnrollSummary.of(columns).results.items():
            for name, count in games._asdict().items():
                results[number, name] += count

    # Nothing that was produced is missing, and nothing of opponents is there.
    expected: Counter[tuple[int, str]] = Counter()
    learners: Counter[int] = Counter()
    for episode in duels.episodes:
        if id(episode) not in recorded:
            continue
        seats = recorded[id(episode)]
        [number] = draws[id(episode)]
        for seat in seats:
            assert all(decision.reward is None for decision in episode.decisions[seat])
        if number == NO_DRAW:
            assert seats == {0, 1}
            continue

        # One draw played all of the other seat: by its actions, too.
        [learner] = seats
        learners[learner] += 1
        opponent = episode.decisions[1 - learner]
        assert {decision.action for decision in opponent} <= {duels.choice_of[number], -1}
        assert all(decision.reward is not None for decision in opponent[:-1])
        if episode.has_result:
            lead = episode.returns[learner] - episode.returns[1 - learner]
            expected[number, {1: "wins", 0: "draws", -1: "losses"}[int(np.sign(lead))]] += 1

    assert +results == +expected
    assert sum(expected.values()) > 100
    assert len({number for number, _ in expected}) > 10
    assert abs(learners[0] - learners[1]) < 0.1 * sum(learners.values())
    assert mirror_rows / counted == pytest.approx(mirror, abs=0.05)
    assert duels.recorder.steps == counted


def test_a_connection_has_whole_games_of_the_sides_of_the_run(tmp_path: Path) -> None:
    duels = Duels(tmp_path / "run", 0, "league.mirror=0")
    with pytest.raises(MessageError, match="3 seats are no whole games of 2 seats") as error:
        duels.service.join(Hello(seats=3), 100)
    assert error.value.field == "seats"
    with pytest.raises(MessageError, match=r"sides of the game are \[0, 0\]") as error:
        duels.service.join(Hello(seats=2, sides=(0, 0)), 100)
    assert error.value.field == "sides"
    assert duels.service.welcome(2)["sides"] == [0, 1]
