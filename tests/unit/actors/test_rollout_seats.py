"""Games of several seats in slots: who is alive, what a seat remembers, and its targets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fake_inference import given
from penstock.actors.matches import Matches, make_environments
from penstock.actors.rollout import Rollout
from penstock.algos.acting import make_policy
from penstock.algos.ops.vtrace import vtrace
from penstock.algos.samples import network_shape, slot_spec
from penstock.algos.unrolled import unrolled
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.schema import Config
from penstock.core.interfaces import Environments
from penstock.core.params import Float32, Stamp
from penstock.envs import make
from penstock.models.acting.inference import LocalInference
from penstock.models.acting.policy import Policy
from penstock.models.distributions import distribution
from penstock.models.torch_nets import build_net
from penstock.profiling.ledger import TimeLedger
from seat_game import PAYOFFS

ROWS, UNROLL = 4, 7
YES, NO = True, False
Columns = dict[str, Any]


def config(env: str, *options: str) -> Config:
    sizes = [f"actors.envs={ROWS}", f"actors.unroll={UNROLL}"]
    return resolve(env, ["algo.name=impala", "env.kind=vector", *sizes, *options])


def weights_of(net: nn.Module) -> Float32:
    return torch.cat([tensor.detach().flatten() for tensor in net.parameters()]).numpy()


def random_net(cfg: Config, env: Environments, seed: int) -> Any:
    torch.manual_seed(seed)
    net = build_net(network_shape(cfg, env.info))
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter))
    return net


class Watched(Policy):
    """Keeps the outputs of every decision."""

    seen: list[Float32]

    def act(self, obs: Any) -> Any:
        self._forward(obs)
        self.seen.append(self.decider.outputs.T.copy())
        return self._taken(self.decider.sample())


def random_members(out: Float32, newer_than: Stamp | None, policy_id: int = 0) -> Stamp:
    """Reads the weights of chairs, each of which has others."""
    out[...] = np.random.default_rng(policy_id).normal(0, 0.4, out.shape)
    return Stamp(0, policy_id)


def play(cfg: Config, env: Environments, weights: Float32, slots: int) -> tuple[Any, list[Columns]]:
    """Returns the logits of each row before its mask, and the columns of each slot."""
    policy = make_policy(cfg, env.info, 3)
    policy.__class__ = Watched
    policy.seen = []  # type: ignore[attr-defined]
    inference = LocalInference(policy, len(weights))
    inference.refresh(given(weights, Stamp(0, 1)))
    rollout = Rollout(env, inference, 0, TimeLedger())
    assert env.refresh(random_members)
    spec = slot_spec(cfg, env.info)
    filled = []
    for _ in range(slots):
        columns = spec.views(spec.zeros())
        rollout.fill(columns, 0)
        rollout.forget_slots()
        filled.append(columns)
    return policy.seen, filled  # type: ignore[attr-defined]


def torch_batch(columns: Columns) -> dict[str, Tensor]:
    return {name: torch.from_numpy(np.array(array)) for name, array in columns.items()}


def fill_script(script: list[Any], *options: str) -> Columns:
    cfg = config("seat_game:Script", "model.hidden=[4]", *options)
    cfg.env.kwargs["script"] = script
    env = make(cfg.env, ROWS)
    _, [columns] = play(cfg, env, weights_of(random_net(cfg, env, 0)), 1)
    env.close()
    return columns


def test_a_row_that_is_out_is_not_alive_until_its_game_begins_again() -> None:
    columns = fill_script(
        [
            {"playing": [YES, YES], "reward": [1, 2]},
            {"playing": [NO, YES], "ended": [YES, NO], "reward": [3, 4]},
            {"playing": [NO, NO], "ended": [NO, YES], "reward": [0, 5]},
            {"playing": [YES, YES]},
        ]
    )
    assert columns["alive"][:, 0].tolist() == [YES, YES, NO, NO, YES, YES, NO]
    assert columns["alive"][:, 1].tolist() == [YES, YES, YES, NO, YES, YES, YES]
    np.testing.assert_array_equal(columns["alive"][:, 2:], columns["alive"][:, :2])
    assert columns["terminated"][:, 0].nonzero()[0].tolist() == [1, 5]
    assert columns["terminated"][:, 1].nonzero()[0].tolist() == [2, 6]
    assert columns["episode_return"][[1, 2], [0, 1]].tolist() == [4, 11]
    assert columns["episode_length"][[1, 2], [0, 1]].tolist() == [2, 3]


def test_a_reward_of_a_seat_that_is_out_is_refused() -> None:
    script = [
        {"playing": [NO, YES], "ended": [YES, NO]},
        {"playing": [NO, NO], "ended": [NO, YES], "reward": [1, 0]},
        {"playing": [YES, YES]},
    ]
    with pytest.raises(UserError, match="gave a reward to a seat that does not play; let a seat"):
        fill_script(script)


@pytest.mark.parametrize("core", ["lstm", "gru", "lstm model.core_inputs=[action,reward]"])
@pytest.mark.parametrize(
    ("kwargs", "mirror"),
    [
        ("{turns: true}", 1.0),
        ("{turns: true, ends_apart: true, seats: 4}", 1.0),
        ("{ends_apart: true}", 1.0),
        ("{turns: true, rivals: true}", 0.5),
        ("{turns: true, rivals: true, seats: 3}", 0.0),
    ],
)
def test_a_recurrent_learner_reproduces_the_actors_logits_of_seats_that_wait(
    core: str, kwargs: str, mirror: float
) -> None:
    """In all rows that are alive, over several unrolls, with the actor's own weights."""
    cfg = config(
        "penstock/SyntheticGames-v0",
        f"env.kwargs={kwargs}",
        "env.kwargs.episode_steps=5",
        "env.kwargs.n_actions=3",
        *f"model.core={core}".split(),
        "model.core_size=8",
        "model.hidden=[8]",
        *([f"league.mirror={mirror}"] if mirror < 1 else []),
    )
    env = make_environments(cfg, 0, TimeLedger(), timed=False)
    assert isinstance(env, Matches) == (mirror < 1)
    net = random_net(cfg, env, 4)
    logits, slots = play(cfg, env, weights_of(net), 4)
    env.close()
    for index, columns in enumerate(slots):
        batch = torch_batch(columns)
        with torch.no_grad():
            outputs, _, mask = unrolled(net, batch, slice(None))
        found = outputs.reshape(UNROLL + 1, ROWS, -1)[:-1].numpy()
        expected = np.stack(logits[index * UNROLL : (index + 1) * UNROLL])
        if mask is not None:
            allowed = mask.reshape(UNROLL + 1, ROWS, -1)[:-1].numpy() != 0
            waits = (allowed.sum(-1) == 1) & columns["alive"]
            assert waits.sum() > UNROLL
            found, expected = np.where(allowed, found, 0), np.where(allowed, expected, 0)
        alive = columns["alive"]
        np.testing.assert_allclose(found[alive], expected[alive], atol=1e-5)
    assert all(columns["core_state"].any() for columns in slots[1:])


def softmax(logits: Any) -> Any:
    exponentials = np.exp(logits - logits.max(-1, keepdims=True))
    return exponentials / exponentials.sum(-1, keepdims=True)


@pytest.mark.parametrize("options", [[], ["league.mirror=0"]])
def test_targets_of_a_game_of_two_plies_equal_a_computation_by_hand(options: list[str]) -> None:
    """The actor's weights are others than the learner's, so that each move has a weight.

    Against members of the pool, a row learns the first seat and the second in turn.
    """
    discount = 0.9
    cfg = config("seat_game:TwoPly", "model.hidden=[6]", "algo.reward_clip=null", *options)
    env = make_environments(cfg, 0, TimeLedger(), timed=False)
    actor, learner = random_net(cfg, env, 1), random_net(cfg, env, 2)
    logits, [columns] = play(cfg, env, weights_of(actor), 1)
    env.close()
    batch = torch_batch(columns)
    with torch.no_grad():
        outputs, values, mask = unrolled(learner, batch, slice(None))
        steps = UNROLL * ROWS
        assert mask is not None
        policy = distribution(learner.actions, outputs[:steps], mask[:steps])
        logp = policy.logp(batch["action"].flatten()).view(UNROLL, ROWS)
        trace = vtrace(
            values=values.view(UNROLL + 1, ROWS),
            rewards=batch["reward"],
            log_rhos=logp - batch["behaviour_logp"],
            terminated=batch["terminated"],
            truncated=batch["truncated"],
            alive=batch["alive"],
            discount=discount,
        )
    found = (trace.errors + values.view(UNROLL + 1, ROWS)[:-1]).numpy()

    value = values.view(UNROLL + 1, ROWS).numpy()
    learned = outputs.view(UNROLL + 1, ROWS, 2).numpy()
    acts: Any = mask.view(UNROLL + 1, ROWS, 2).numpy().all(2)
    seen_payoffs = set()
    for begin in (0, 3):  # a game is two plies and a row that only resets
        assert columns["alive"][begin : begin + 3].all(1).tolist() == [YES, YES, NO]
        is_first = acts[begin]
        assert (acts[begin + 1] == ~is_first).all()
        assert is_first.tolist() == [(row + begin * bool(options)) % 2 == 0 for row in range(ROWS)]
        for row in range(ROWS):
            ply = begin if is_first[row] else begin + 1
            move = columns["action"][ply, row]
            gain = columns["reward"][begin + 1, row]
            payoffs = PAYOFFS[move] if is_first[row] else -PAYOFFS[:, move]
            assert gain in payoffs
            if not options:
                assert gain == payoffs[columns["action"][2 * begin + 1 - ply, row ^ 1]]
            seen_payoffs.add(gain)

            # The weight of a move is min(1, pi / mu); that of a seat that waits is 1.
            wanted, acted = softmax(learned[ply, row]), softmax(logits[ply][row])
            rho = min(1, wanted[move] / acted[move])
            v0, v1 = value[begin, row], value[begin + 1, row]
            if is_first[row]:
                target = gain
                first_target = v0 + rho * (discount * v1 - v0) + discount * rho * (gain - v1)
            else:
                target = v1 + rho * (gain - v1)
                first_target = discount * target
            assert found[begin + 1, row] == pytest.approx(target, abs=1e-5)
            assert found[begin, row] == pytest.approx(first_target, abs=1e-5)
            assert v0 != pytest.approx(first_target)
    assert len(seen_payoffs) > 2


def test_frames_that_are_written_once_are_refused_when_a_game_says_who_plays() -> None:
    cfg = config(
        "penstock/SyntheticGames-v0",
        "env.kwargs={ends_apart: true, obs_shape: [2, 40, 40], obs_dtype: uint8}",
        "transport.frame_stack=2",
    )
    env = make(cfg.env, ROWS)
    size = network_shape(cfg, env.info).layout.size
    with pytest.raises(UserError, match=r"says which rows play.*set transport.frame_stack=null"):
        play(cfg, env, np.zeros(size, np.float32), 1)
    env.close()
