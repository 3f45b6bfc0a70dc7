"""`learner.compile`: a compiled network makes the same updates."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.envs import probe
from penstock.learner.passes import compile_network
from penstock.learner.sources.staging import StagingBatch
from penstock.learner.trainer import Trainer
from small_trainer import slot

# torch's compiler imports what torch calls old
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

needs_compiler = pytest.mark.skipif(
    shutil.which("g++") is None, reason="torch.compile needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.compiler.reset()


def trained(*options: str) -> Trainer:
    small = ("algo.name=ppo", "actors.envs=8", "actors.unroll=6", "learner.updates_per_batch=2")
    config = resolve("cartpole", [*small, "learner.device=cpu", *options])
    made = Trainer(config, probe(config.env))
    batch = StagingBatch(made.spec, 1, made.device)
    rng = np.random.default_rng(0)
    for _ in range(2):
        batch.gather([slot(made, rng)])
        made.step(batch)
    return made


@pytest.mark.slow
@needs_compiler
def test_a_compiled_network_takes_the_same_steps() -> None:
    eager, compiled = trained(), trained("learner.compile=true")
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert counted > 0
    assert eager.layout == compiled.layout
    torch.testing.assert_close(
        eager.optimizer.values, compiled.optimizer.values, rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_a_network_that_cannot_be_compiled_is_reported() -> None:
    import torch._inductor.config as settings

    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    compile_network(net)
    rows = torch.ones(4, 3)
    with settings.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(UserError, match=r"learner.compile: torch.compile failed .*; set learn"):
            net(rows)
        with torch.compiler.set_stance("force_eager"):
            assert net(rows).shape == (4, 2)
