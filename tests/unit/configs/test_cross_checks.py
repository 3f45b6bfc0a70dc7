"""Contradictory options are refused in one sentence with advice that works."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import dump, load_run, presets, resolve

SHM = ["transport.kind=shm"]

CASES = {
    "envs not divisible": (
        ["actors.envs=30", "learner.updates_per_batch=4"],
        "actors.envs 30 is not divisible by learner.updates_per_batch 4, and each update takes an "
        "equal share of a slot's environments; set actors.envs=32 or learner.updates_per_batch=3",
        ["actors.envs=32"],
    ),
    "envs not divisible, the other way": (
        ["actors.envs=7", "learner.updates_per_batch=2"],
        "actors.envs 7 is not divisible by learner.updates_per_batch 2, and each update takes an "
        "equal share of a slot's environments; set actors.envs=8 or learner.updates_per_batch=1",
        ["learner.updates_per_batch=1"],
    ),
    "equilibrium of unlike sides": (
        ["league.draw=nash", "league.seats=[0, 1]"],
        "league.draw nash needs sides that are alike, and with league.seats [0, 1] they are not; "
        "set league.draw=pfsp:squared",
        ["league.draw=pfsp:squared"],
    ),
    "equilibrium without the games that it goes by": (
        ["league.draw=nash", "eval.every_steps=null"],
        "league.draw nash goes by games that the evaluator plays, and this run has no evaluator; "
        "set eval.every_s=60, or league.draw=uniform",
        ["eval.every_s=60"],
    ),
    "reset of several learners": (
        ["league.reset=true", "learner.count=2", "actors.count=2"],
        "league.reset resets the weights of one learner, and learner.count is 2; set "
        "learner.count=1 or league.reset=false",
        ["league.reset=false"],
    ),
    "batch larger than all slots": (
        ["actors.count=1", "learner.batch_slots=3"],
        "learner.batch_slots 3 is more than the 2 slots that actors.count 1 and transport.slots 2 "
        "provide; set learner.batch_slots=2 or less, or actors.count=2 or more",
        ["learner.batch_slots=2"],
    ),
    "batch larger than all slots of each learner": (
        ["learner.count=2", "actors.count=3", "transport.slots=1", "learner.batch_slots=2"],
        "learner.batch_slots 2 is more than the 1 slots that actors.count 3 and transport.slots 1 "
        "provide for each learner; set learner.batch_slots=1 or less, or actors.count=4 or more",
        ["actors.count=4"],
    ),
    "batch for which auto does not start enough actors": (
        ["actors.count=auto", "learner.batch_slots=64"],
        "learner.batch_slots 64 is more than the 32 slots that actors.count auto (16) and "
        "transport.slots 2 provide; set learner.batch_slots=32 or less, or actors.count=32 or more",
        ["actors.count=32"],
    ),
    "lag limit below what a single batch makes": (
        ["learner.prefetch=1", "learner.updates_per_batch=4", "transport.max_policy_lag=7"],
        "transport.max_policy_lag 7 is below 8, the lag that learner.prefetch and "
        "learner.publish_every make with the slots of a single batch; set "
        "transport.max_policy_lag=8, or 3 or less to play a batch during the last "
        "steps of the one before",
        ["transport.max_policy_lag=3"],
    ),
    "lag limit below what a single batch of one update makes": (
        ["learner.prefetch=2", "learner.updates_per_batch=1", "transport.max_policy_lag=1"],
        "transport.max_policy_lag 1 is below 3, the lag that learner.prefetch and "
        "learner.publish_every make with the slots of a single batch; set "
        "transport.max_policy_lag=3, or 0 for the synchronous mode",
        ["transport.max_policy_lag=0"],
    ),
    "compiled network of another algorithm": (
        ["algo.name=dqn", "learner.compile=true"],
        "learner.compile true does nothing for algo.name dqn; set learner.compile=false",
        ["learner.compile=false"],
    ),
    "turns of play and training with replay": (
        ["algo.name=dqn", "transport.max_policy_lag=0"],
        "transport.max_policy_lag 0 makes actors wait for the weights of each batch, and algo.name "
        "dqn does not train on batches of fresh unrolls; set transport.max_policy_lag=1000, and "
        "transport.kind=inproc to play and train in turns",
        ["transport.max_policy_lag=1000"],
    ),
    "turns of play and training with several learners": (
        ["actors.count=2", "learner.count=2", "transport.max_policy_lag=0"],
        "transport.max_policy_lag 0 makes actors wait for the weights of each batch, and with "
        "learner.count 2 a learner also continues without a batch of its own; set learner.count=1 "
        "or transport.max_policy_lag=1000",
        ["learner.count=1"],
    ),
    "batches played during others with several learners": (
        [
            *("actors.count=2", "learner.count=2", "algo.name=ppo", "algo.epochs=500"),
            *("learner.updates_per_batch=4", "transport.max_policy_lag=2"),
        ],
        "transport.max_policy_lag 2 makes actors wait for the weights of each batch, and with "
        "learner.count 2 a learner also continues without a batch of its own; set learner.count=1 "
        "or transport.max_policy_lag=4000",
        ["transport.max_policy_lag=4000"],
    ),
    "turns in one process that leave slots over": (
        [
            "transport.kind=inproc",
            "actors.count=4",
            "learner.batch_slots=6",
            "transport.max_policy_lag=0",
        ],
        "transport.max_policy_lag 0 makes actors wait for the weights of each batch, and with "
        "transport.kind inproc each of actors.count 4 plays one slot per turn, so "
        "learner.batch_slots 6 must be a multiple of that; set learner.batch_slots=8, "
        "actors.count=1 or transport.max_policy_lag=1000",
        ["learner.batch_slots=8"],
    ),
    "rewards in two ways": (
        ["algo.name=ppo", "algo.normalize_rewards=true", "algo.reward_clip=1"],
        "algo.normalize_rewards needs unclipped rewards, and algo.reward_clip is 1; set "
        "algo.reward_clip=null or algo.normalize_rewards=false",
        ["algo.reward_clip=null"],
    ),
    "rewards scaled after they are normalised": (
        ["algo.name=ppo", "algo.normalize_rewards=true", "algo.reward_scale=0.1"],
        "algo.normalize_rewards scales rewards already, and algo.reward_scale is 0.1; set "
        "algo.reward_scale=1 or algo.normalize_rewards=false",
        ["algo.reward_scale=1"],
    ),
    "an end between epochs where there is one": (
        ["algo.name=ppo", "algo.epochs=1", "algo.target_kl=0.01"],
        "algo.target_kl 0.01 ends a batch between two epochs, and algo.epochs is 1; set "
        "algo.epochs=4 or algo.target_kl=null",
        ["algo.target_kl=null"],
    ),
    "replay without use": (
        ["replay.capacity=1e5"],
        "replay.capacity has no effect with algo.name impala, which does not use replay; set "
        "algo.name=dqn, or replay={}",
        ["algo.name=dqn"],
    ),
    "replay without use, the other way": (
        ["replay.alpha=0.5"],
        "replay.alpha has no effect with algo.name impala, which does not use replay; set "
        "algo.name=dqn, or replay={}",
        ["replay={}"],
    ),
    "several updates of a batch from replay": (
        ["algo.name=dqn", "learner.updates_per_batch=4"],
        "learner.updates_per_batch 4 has no effect with algo.name dqn, which trains once on each "
        "batch that it samples from replay; set learner.updates_per_batch=1",
        ["learner.updates_per_batch=1"],
    ),
    "threads that gather nothing": (
        ["algo.name=dqn", "learner.gather_threads=2"],
        "learner.gather_threads 2 has no effect with algo.name dqn, which does not gather slots "
        "into batches; set learner.gather_threads=null",
        ["learner.gather_threads=null"],
    ),
    "a batch larger than replay": (
        ["algo.name=sac", "replay.capacity=100", "replay.min_size=10"],
        "replay.batch_size 256 is more than half of replay.capacity 100, and each reset takes up "
        "the room of a step, so that with short episodes training would never begin; set "
        "replay.batch_size=50 or less",
        ["replay.batch_size=50"],
    ),
    "a start that is never reached": (
        ["algo.name=sac", "replay.capacity=1e3"],
        "replay.min_size 10000 is more than half of replay.capacity 1000, and each reset takes up "
        "the room of a step, so that with short episodes training would never begin; set "
        "replay.min_size=500 or less",
        ["replay.min_size=500"],
    ),
    "a sampler without its errors": (
        ["algo.name=dqn", "replay.sampler=uniform"],
        "replay.sampler uniform does not draw by TD errors, and replay.prioritized is true; set "
        "replay.prioritized=false, or replay.sampler=null",
        ["replay.prioritized=false"],
    ),
    "a schedule of nothing": (
        ["algo.name=dqn", "replay.beta=1", "replay.beta_steps=1e6"],
        "replay.beta_steps 1000000 has no effect while replay.beta is 1; "
        "set replay.beta=0.4 or replay.beta_steps=null",
        ["replay.beta=0.4"],
    ),
    "bounds the wrong way round": (
        ["algo.name=sac", "algo.log_std_min=3"],
        "algo.log_std_min 3 must lie below algo.log_std_max 2; set algo.log_std_min=-20",
        ["algo.log_std_min=-20"],
    ),
    "a target without tuning": (
        ["algo.name=sac", "algo.target_entropy=-2", "algo.tune_alpha=false"],
        "algo.target_entropy -2 does nothing while algo.tune_alpha is off; "
        "set algo.tune_alpha=true or algo.target_entropy=null",
        ["algo.tune_alpha=true"],
    ),
    "memory for dqn": (
        ["algo.name=dqn", "model.core=lstm"],
        "model.core lstm is for actor-critics and r2d2, and algo.name dqn is neither; "
        "set algo.name=ppo, or for actions to choose from algo.name=r2d2, or model.core=none",
        ["model.core=none"],
    ),
    "memory for td3": (
        ["algo.name=td3", "model.core=lstm"],
        "model.core lstm is for actor-critics and r2d2, and algo.name td3 is neither; "
        "set algo.name=ppo, or for actions to choose from algo.name=r2d2, or model.core=none",
        ["model.core=none"],
    ),
    "memory for sac, the other way": (
        ["algo.name=sac", "model.kind=gru"],
        "model.core gru is for actor-critics and r2d2, and algo.name sac is neither; "
        "set algo.name=ppo, or for actions to choose from algo.name=r2d2, or model.core=none",
        ["algo.name=ppo"],
    ),
    "r2d2 without memory": (
        ["algo.name=r2d2", "model.core=none"],
        "algo.name r2d2 trains a network with memory, and model.core is none; set model.core=lstm, "
        "or algo.name=dqn",
        ["model.core=lstm"],
    ),
    "inputs of no core": (
        ["model.core_inputs=[action, reward]"],
        "model.core_inputs [action, reward] are read by a core, and model.core is none; set "
        "model.core=lstm or model.core_inputs=[]",
        ["model.core=lstm"],
    ),
    "inputs of a core for dqn": (
        ["algo.name=dqn", "model.core_inputs=[action]"],
        "model.core_inputs [action] is for actor-critics and r2d2, and algo.name dqn is neither; "
        "set algo.name=ppo, or for actions to choose from algo.name=r2d2, or model.core_inputs=[]",
        ["model.core_inputs=[]"],
    ),
    "settings of no network": (
        ["model.settings.width=3"],
        "model.settings are arguments of the network that model.entry names, and model.entry is "
        "null; set model.entry, or model.settings={}",
        ["model.settings={}"],
    ),
    "memory in numpy": (
        ["actors.inference=numpy", "model.kind=gru"],
        "actors.inference numpy supports networks without core only, not gru; "
        "set actors.inference=torch",
        ["actors.inference=torch"],
    ),
    "numpy in bf16": (
        ["actors.inference=numpy", "actors.precision=bf16"],
        "actors.inference numpy does not support actors.precision bf16; "
        "set actors.inference=torch or actors.precision=fp32",
        ["actors.precision=fp32"],
    ),
    "numpy for convolutions": (
        ["actors.inference=numpy", "model.kind=nature_cnn"],
        "actors.inference numpy supports model.kind mlp only, not nature_cnn; "
        "set actors.inference=torch",
        ["actors.inference=torch"],
    ),
    "decay without length": (
        ["learner.lr_end_fraction=0.1"],
        "learner.lr_end_fraction 0.1 needs learner.lr_decay_steps, the agent steps over which the "
        "learning rate falls; set it, for example, to 1e6",
        ["learner.lr_decay_steps=1e6"],
    ),
    "length without decay": (
        ["learner.lr_decay_steps=1e6"],
        "learner.lr_decay_steps 1000000 has no effect while learner.lr_end_fraction is 1; "
        "set learner.lr_end_fraction=0 to decay to zero",
        ["learner.lr_end_fraction=0"],
    ),
    "two schedules of the learning rate": (
        [
            "learner.lr={from: 1e-3, to: 0}",
            "learner.lr_end_fraction=0.1",
            "learner.lr_decay_steps=1e6",
        ],
        "learner.lr is a schedule from 0.001 to 0, and learner.lr_end_fraction 0.1 would lower the "
        "rate too; set learner.lr=0.001, or learner.lr_end_fraction=1 and "
        "learner.lr_decay_steps=null",
        ["learner.lr=0.001"],
    ),
    "more minibatches than steps": (
        [
            "algo={name: ppo, minibatches: steps}",
            "actors.envs=3",
            "actors.unroll=5",
            "learner.updates_per_batch=16",
        ],
        "learner.updates_per_batch 16 is more than the 15 steps of a batch (actors.envs x "
        "actors.unroll x learner.batch_slots); set learner.updates_per_batch=15 or less",
        ["learner.updates_per_batch=15"],
    ),
    "minibatches of steps for a network with memory": (
        ["algo.name=ppo", "algo.minibatches=steps", "model.core=gru"],
        "algo.minibatches steps are in no order, and model.core gru needs whole unrolls; set "
        "algo.minibatches=unrolls or model.core=none",
        ["algo.minibatches=unrolls"],
    ),
    "envs not divisible, where minibatches may be of steps": (
        [
            "algo.name=ppo",
            "algo.minibatches=unrolls",
            "actors.envs=7",
            "learner.updates_per_batch=2",
        ],
        "actors.envs 7 is not divisible by learner.updates_per_batch 2, and each update takes an "
        "equal share of a slot's environments; set actors.envs=8 or learner.updates_per_batch=1, "
        "or algo.minibatches=steps",
        ["algo.minibatches=steps"],
    ),
    "evaluation of what is never saved": (
        ["transport.kind=inproc", "eval.every_s=60"],
        "eval.every_s 60 evaluates checkpoints, and with transport.kind inproc these are written "
        "by steps only; set checkpoint.every_steps=1000 or eval.every_s=null",
        ["checkpoint.every_steps=1000"],
    ),
    "a number that a store does not keep": (
        ["actors.envs=auto", "checkpoint.store=s3://bucket/run"],
        "actors.envs auto is kept in the run folder, and a run that resumes from checkpoint.store "
        "in another folder needs the same number; set actors.envs to a number, such as "
        "actors.envs=16, or checkpoint.store=null",
        ["actors.envs=16"],
    ),
    "hold without return": (
        ["stop.hold_s=30"],
        "stop.hold_s 30 counts from the moment when stop.return is reached, and stop.return is "
        "null; set stop.return, or stop.minutes for a time limit",
        ["stop.return=475"],
    ),
    "bind with shared memory": (
        [*SHM, "transport.bind=tcp://127.0.0.1:7700"],
        "transport.bind is for actors on other hosts, and transport.kind shm works on one host "
        "only; set transport.kind=zmq or transport.bind=null",
        ["transport.kind=zmq"],
    ),
    "bind in one process": (
        ["transport.kind=inproc", "transport.bind=tcp://127.0.0.1:7700"],
        "transport.bind is for actors on other hosts, and transport.kind inproc works on one host "
        "only; set transport.kind=zmq or transport.bind=null",
        ["transport.bind=null"],
    ),
    "keys with shared memory": (
        [*SHM, "transport.curve=keys"],
        "transport.curve is for actors on other hosts, and transport.kind shm works on one host "
        "only; set transport.kind=zmq or transport.curve=null",
        ["transport.curve=null"],
    ),
    "keys and none": (
        ["transport.curve=keys", "transport.insecure=true"],
        "transport.insecure and transport.curve are both set; set only one of them",
        ["transport.insecure=false"],
    ),
    "open to other hosts": (
        ["transport.bind=tcp://0.0.0.0:7700"],
        "transport.bind tcp://0.0.0.0:7700 accepts connections from other hosts without "
        "authentication; set transport.curve to a folder of keys (penstock keys new), or "
        "transport.insecure=true on a trusted network",
        ["transport.insecure=true"],
    ),
}


@pytest.mark.parametrize(("overrides", "sentence", "advice"), CASES.values(), ids=CASES)
def test_a_contradiction_is_refused_and_its_advice_works(
    overrides: list[str], sentence: str, advice: list[str], plain: str
) -> None:
    with pytest.raises(UserError) as refused:
        resolve(plain, overrides)
    place, _, text = str(refused.value).rpartition(": ")
    assert text == sentence
    said = place.split(" and ")
    assert {p.removeprefix("override ") for p in said} <= set(overrides)
    resolve(plain, [*overrides, *advice])


@pytest.mark.parametrize(
    "overrides",
    [
        ["transport.bind=tcp://127.0.0.1:7700"],
        ["transport.bind=tcp://127.8.8.8:7700"],
        ["transport.bind=tcp://localhost:*"],
        ["transport.bind=tcp://[::1]:7700"],
        ["transport.bind=ipc:///run/a"],
        ["transport.bind=tcp://*:7700", "transport.curve=keys"],
        ["transport.bind=tcp://*:7700", "transport.insecure=true", "transport.kind=zmq"],
        ["stop.return=1", "stop.hold_s=3"],
        ["learner.lr_end_fraction=1"],
        ["learner.batch_slots=4", "actors.count=2"],
        ["actors.inference=torch", "actors.precision=bf16"],
        ["learner.prefetch=0"],
        ["algo.name=dqn", "learner.batch_slots=99"],
    ],
)
def test_compatible_options_are_accepted(overrides: list[str], plain: str) -> None:
    resolve(plain, overrides)


@pytest.mark.parametrize(
    ("learners", "batch", "slots", "actors"),
    [(1, 1, 2, 2), (1, 2, 1, 2), (1, 8, 2, 4), (8, 2, 1, 16), (8, 2, 2, 8), (3, 5, 2, 9)],
)
def test_auto_starts_as_many_actors_as_fill_a_batch_of_each_learner(
    learners: int, batch: int, slots: int, actors: int, plain: str
) -> None:
    options = [f"learner.batch_slots={batch}", f"transport.slots={slots}", "actors.count=auto"]
    config = resolve(plain, [*options, f"learner.count={learners}"])
    assert config.first_actors == actors


@pytest.mark.parametrize(
    ("target", "overrides", "choices"),
    [
        ("cartpole", [], [16, 32, 64]),
        ("pong", [], [8, 16, 32]),  # two slots of 32 steps, in eight updates
        ("cartpole", ["learner.updates_per_batch=6"], [24, 48]),  # each has a share of them
        ("cartpole", ["actors.unroll=1"], [128]),
        ("cartpole", ["actors.unroll=4096"], [1]),
        ("cartpole", ["algo.name=ppo", "algo.minibatches=steps"], [16, 32, 64]),
        ("cartpole_dqn", [], [2, 4, 8, 16, 32]),  # slots of 16 steps, batches from replay
    ],
)
def test_numbers_of_environments_keep_batches_within_bounds(
    target: str, overrides: list[str], choices: list[int]
) -> None:
    config = resolve(target, [*overrides, "actors.envs=auto"])
    assert config.envs_choices == choices
    assert config.actor_envs == choices[0]
    assert resolve(target, [*overrides, "actors.envs=96"]).actor_envs == 96


@pytest.mark.parametrize("target", presets())
def test_auto_finds_a_number_of_environments_for_every_preset(target: str) -> None:
    assert len(resolve(target, ["actors.envs=auto"]).envs_choices) >= 2


@pytest.mark.parametrize("target", presets())
def test_auto_starts_two_actors_in_every_preset(target: str) -> None:
    assert resolve(target, ["actors.count=auto"]).first_actors == 2


def test_ppo_clip_must_be_below_1(plain: str) -> None:
    with pytest.raises(UserError) as refused:
        resolve(plain, ["algo.name=ppo", "algo.clip=1"])
    assert "algo.clip is 1; it must be a number above 0 and below 1" in str(refused.value)
    resolve(plain, ["algo.name=ppo", "algo.clip=0.99"])


@pytest.mark.parametrize("target", presets())
def test_every_preset_loads_from_the_file_that_its_run_writes(target: str, tmp_path: Path) -> None:
    config = resolve(target)
    (tmp_path / "config.yaml").write_text(dump(config))
    assert load_run(tmp_path) == config


@pytest.mark.parametrize("bind", ["tcp://127.0.0.1.evil.org:7700", "tcp://localhost.evil.org:1"])
def test_a_name_that_only_begins_like_this_host_is_not_this_host(bind: str, plain: str) -> None:
    with pytest.raises(UserError, match="from other hosts without authentication"):
        resolve(plain, [f"transport.bind={bind}"])


def test_every_contradiction_is_shown_with_both_places() -> None:
    with pytest.raises(UserError) as refused:
        resolve("pong_impala", ["learner.updates_per_batch=3", "stop.hold_s=3"])
    first, second = str(refused.value).splitlines()
    assert first.startswith("configs/pong_impala.yaml:")
    assert " and override learner.updates_per_batch=3: actors.envs 32 is not" in first
    assert second.startswith("override stop.hold_s=3: stop.hold_s 3 counts")
