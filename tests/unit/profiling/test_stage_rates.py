"""Steps and bytes of each stage, against figures worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.configs.load import resolve
from penstock.profiling.report.stage_rates import Rate, WindowRates, stage_rates

HERE = Rate(1000.0, 50_000.0)
RECEIVED = {"slots": 1.0, "steps": 200.0, "raw_nbytes": 10_000.0, "coded_nbytes": 2_000.0}
EPOCHS = ("algo={name: ppo, epochs: 5}", "learner.updates_per_batch=1")
REPLAY = ("algo={name: dqn}", "learner.prefetch=1", "replay.batch_size=64")


def found(
    *overrides: str, on_gpu: bool = False, weights_nbytes: int | None = 4000, **changes: Any
) -> dict[str, tuple[float | None, ...]]:
    """By stage; of a run in shared memory, 1000 steps of 50 bytes a second, of which 800 are
    trained in 10 updates, unless it is said otherwise."""
    rates = WindowRates(HERE, None, produced=990.0, trained=800.0, updates=10.0, learners=1)
    config = resolve("cartpole", overrides)
    rates = rates._replace(**changes)
    entries = stage_rates(config, rates, on_gpu=on_gpu, weights_nbytes=weights_nbytes)
    return {entry.pop("stage"): tuple(entry.values()) for entry in entries}


def test_step_has_the_same_bytes_in_a_batch_and_in_the_store() -> None:
    assert found(on_gpu=True) == {
        "actors": (1000.0, 50_000.0),
        "store": (1000.0, 50_000.0),
        "gather": (800.0, 40_000.0),
        "h2d": (800.0, 40_000.0),
        "learner": (800.0, 40_000.0),
        "weights": (None, 40_000.0, 10.0),
    }


def test_steps_sent_by_actors_are_stored_by_connectors() -> None:
    over_wire = found("transport.kind=zmq", received=RECEIVED)
    assert list(over_wire) == ["actors", "wire", "store", "gather", "learner", "weights"]
    assert over_wire["wire"] == (200.0, 2_000.0)
    assert over_wire["store"] == (200.0, 10_000.0)
    # Beside actors of this host, who write in place, others have joined.
    mixed = found(received=RECEIVED)
    assert mixed["actors"] == (1000.0, 50_000.0)
    assert mixed["store"] == (1200.0, 60_000.0)
    # None is here: they are known by what has arrived.
    elsewhere = found(received=RECEIVED, played=None)
    assert elsewhere["actors"] == (990.0, 10_000.0)
    assert elsewhere["store"] == (200.0, 10_000.0)


def test_replayed_step_counts_as_often_as_it_is_drawn() -> None:
    drawn = found(*REPLAY, learners=2)
    assert drawn["store"] == (1000.0, 50_000.0)
    assert drawn["gather"] == drawn["learner"] == (1280.0, None)  # 10 x 64, by each of two
    assert drawn["weights"][1] == 80_000.0


@pytest.mark.parametrize(
    ("overrides", "versions"),
    [
        (("learner.publish_every=4",), 2.5),
        (EPOCHS, 2.0),  # once a batch
        (("learner.accumulate=2",), 10.0),  # not more often than there are updates
        ((*EPOCHS, "transport.max_policy_lag=0"), 2.0),
        # The synchronous mode publishes after each batch, whatever `publish_every` is.
        (("transport.max_policy_lag=0", "learner.publish_every=4"), 10.0),
        # The next batch is lent with two updates left, by weights of its own.
        ((*EPOCHS, "transport.max_policy_lag=2"), 4.0),
    ],
)
def test_weights_are_sent_once_per_batch_or_when_slots_are_lent(
    overrides: tuple[str, ...], versions: float
) -> None:
    assert found(*overrides)["weights"] == (None, versions * 4000, versions)


def test_unknown_rates_are_none() -> None:
    unknown = found(
        weights_nbytes=None, updates=None, played=Rate(0.0, None), trained=0.0, received=None
    )
    assert unknown["store"] == (0.0, None)
    assert unknown["gather"] == (0.0, None)
    assert unknown["weights"] == (None, None, None)
    silent = dict.fromkeys(RECEIVED)
    assert found(received=silent, played=None)["store"] == (None, None)
