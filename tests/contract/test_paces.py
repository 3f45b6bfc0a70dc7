"""Every registered pace: two learners join, step together in the order of the seam, and stop."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import numpy as np
import pytest

from pace_world import FEW, WORLD, config_of, pace_of, train_two
from penstock.configs.learner import PACES, PaceSpec
from penstock.configs.reduce import CODECS

SUMMING = [name for name, spec in PACES.specs.items() if spec.sums_gradients]
SERVED = [name for name in PACES.specs if PACES.is_served(name)]


@pytest.mark.parametrize("pace", PACES.specs)
def test_two_learners_step_and_stop(pace: str, tmp_path: Path) -> None:
    learners = train_two(tmp_path, config_of(pace))
    for learner in learners:
        assert learner.heard_stop
        assert learner.world == WORLD
        assert np.isfinite(learner.norms).all()
        assert not np.array_equal(learner.values, learner.start)
        assert np.isfinite(learner.values).all()
    assert len(learners[0].norms) == FEW
    assert learners[0].state is not None, "the learner that saves has a state"


@pytest.mark.parametrize("pace", SUMMING)
def test_learners_whose_gradients_are_summed_stay_equal(pace: str, tmp_path: Path) -> None:
    first, second = train_two(tmp_path, config_of(pace))
    assert np.array_equal(first.values, second.values)
    assert first.norms == second.norms


@pytest.mark.parametrize("pace", SERVED)
def test_a_run_that_ends_before_a_server_answers_has_no_sync(pace: str, tmp_path: Path) -> None:
    servers = (f"ipc://{tmp_path}/nobody",)
    with pace_of(tmp_path, config_of(pace), 0, servers) as (made, ctx, _):
        ctx.stop()
        assert made.join(None) is None


@pytest.mark.parametrize("spec", PACES.specs.values(), ids=list(PACES.specs))
def test_pace_spec_names_existing_codecs_and_functions(spec: PaceSpec) -> None:
    assert set(spec.codecs or ()) <= CODECS.specs.keys()
    assert callable(resolve_name(spec.entry_point))
    assert not spec.server or callable(resolve_name(spec.server))
