"""The config and the roles of a run that games play."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import dump, resolve
from penstock.configs.schema import Config
from penstock.core.cores import most_actors
from penstock.core.role_spec import Stage
from penstock.launch import placement, topology
from penstock.launch.run import LOCAL_ENGINE, MakeSpecs
from penstock.launch.serve_env import resolve_games_run, serve_env

RUNTIME = Path("/tmp/penstock-x")
BIND = "tcp://127.0.0.1:8900"


def played(target: str, *overrides: str) -> Config:
    return resolve_games_run(target, overrides, "no", None).config


@pytest.mark.parametrize("target", ["cartpole", "cartpole_dqn", "pong", "cartpole_ppo", "memory"])
def test_slots_of_one_seat_have_the_steps_and_the_memory_of_an_ordinary_run(target: str) -> None:
    ordinary = resolve(target)
    games = played(target)
    envs = ordinary.actor_envs
    assert (games.actors.games, games.actor_envs) == (True, 1)
    # Memory holds as many unrolls.
    assert games.first_actors == ordinary.first_actors * envs
    assert games.transport.slots == ordinary.transport.slots
    if ordinary.algo.trains_on == "unrolls":
        assert games.learner.batch_slots == ordinary.learner.batch_slots * envs
    assert games.transport.frame_stack is None
    assert not games.has_evaluator


def test_a_resumed_run_keeps_its_numbers(tmp_path: Path) -> None:
    config = played("cartpole", f"run.dir={tmp_path}")
    (tmp_path / "config.yaml").write_text(dump(config))
    resumed = resolve_games_run(str(tmp_path), [], "auto", None).config
    assert resumed == config


def test_a_resumed_run_has_one_environment_in_a_slot(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(dump(played("cartpole", f"run.dir={tmp_path}")))
    with pytest.raises(UserError, match=r"actors\.envs=8: .* set actors\.envs=1"):
        resolve_games_run(str(tmp_path), ["actors.envs=8"], "auto", None)


def test_a_presets_bound_on_the_policy_lag_is_dropped_and_the_users_is_refused() -> None:
    assert played("halfcheetah").transport.max_policy_lag == 1000
    with pytest.raises(UserError, match="is below the 160 optimizer steps of a batch"):
        played("halfcheetah", "transport.max_policy_lag=24")


def test_a_target_of_one_actor_serves_two_learners_once_its_count_says_so() -> None:
    with pytest.raises(UserError, match=r"set actors\.count=2 or more"):
        played("cartpole_ppo", "learner.count=2")
    config = played("cartpole_ppo", "learner.count=2", "actors.count=2")
    assert config.first_actors == 2 * resolve("cartpole_ppo").actor_envs


REFUSED = {
    "transport.kind=inproc": "transport.kind inproc brings samples from actors",
    "transport.kind=zmq": "set transport.kind=auto",
    "transport.frame_stack=4": "games send whole observations; set transport.frame_stack=null",
    "env.record=[won]": "env.record won names values of an environment's `info`",
    "transport.max_policy_lag=0": "is below the 1 optimizer steps of a batch",
    "league.bots={random: 0.5}": "league.bots random are scripted players of an environment",
    "eval.every_s=30": "eval.every_s would evaluate in an environment",
    "learner.count=1..2": "set learner.count=1",
    "transport.connectors=2": "set transport.connectors=1",
}


@pytest.mark.parametrize("override", REFUSED)
def test_an_option_without_meaning_for_games_is_refused_by_its_name(override: str) -> None:
    with pytest.raises(UserError) as raised:
        played("cartpole", override)
    assert REFUSED[override] in str(raised.value)
    assert str(raised.value).startswith(f"override {override}")


def test_a_frame_stack_of_a_file_is_refused_and_that_of_its_base_is_not(tmp_path: Path) -> None:
    path = tmp_path / "game.yaml"
    path.write_text("base: pong\n")
    assert played(str(path)).transport.frame_stack is None
    path.write_text("base: pong\ntransport: {frame_stack: 4}\n")
    with pytest.raises(UserError, match=r"game\.yaml:2: transport\.frame_stack 4 is of"):
        played(str(path))


def test_minibatches_must_divide_the_slots_of_a_batch() -> None:
    assert played("cartpole_ppo").learner.batch_slots % 4 == 0
    config = played("cartpole_ppo")
    with pytest.raises(UserError, match=r"set learner\.batch_slots=8, or algo\.minibatches=steps"):
        resolve(config, ["learner.batch_slots=6"])


def test_each_learner_has_a_connector_of_games_at_a_port_of_its_own() -> None:
    config = played("cartpole", "learner.count=2")
    secret = {"token": "0123456789abcdef"}
    specs = topology.serve_env_roles(config, BIND, secret, RUNTIME)
    assert {spec.name: spec.address for spec in specs} == {
        "learner-0": None,
        "learner-1": None,
        "connector-0": BIND,
        "connector-1": "tcp://127.0.0.1:8901",
    }
    assert [spec.listen for spec in specs] == [None, None, secret, secret]
    assert secret["token"] not in repr(specs)
    assert all(spec.listens for spec in specs if spec.stage is Stage.CARRIERS)


def test_other_commands_refuse_a_run_of_games() -> None:
    config = played("cartpole")
    with pytest.raises(UserError, match="use penstock serve-env"):
        topology.train_roles(config, RUNTIME)
    with pytest.raises(UserError, match="use penstock serve-env"):
        topology.learner_roles(config, BIND, RUNTIME)


def test_on_a_cluster_games_connect_to_the_host_of_the_learner() -> None:
    config = played("cartpole")
    assert most_actors(config) > 2  # more than the hosts have cores
    assert placement.adapt_to_hosts(config, [2, 2], Path("unused")) == config

    specs = topology.serve_env_roles(config, "tcp://*:8900", {}, RUNTIME)
    specs, [bundle] = placement.make_bundles(specs, [2, 2])
    assert set(bundle.roles) == {"learner-0", "connector-0"}
    assert bundle.cpus == 1


def run_games(target: str | None, bind: str, *overrides: str) -> None:
    serve_env(
        target,
        overrides,
        bind,
        {},
        "no",
        as_json=False,
        source=None,
        place=LOCAL_ENGINE,
        show=lambda text: pytest.fail(f"it waits: {text}"),
    )


def test_a_folder_that_holds_a_run_is_refused_before_a_game_has_connected(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("env: {id: games}")
    with pytest.raises(UserError, match="already holds a run"):
        run_games(None, BIND, f"run.dir={tmp_path}")


def test_a_folder_that_cannot_be_made_is_refused_before_a_game_has_connected() -> None:
    with pytest.raises(UserError, match="the run folder /proc/nope cannot be made"):
        run_games(None, BIND, "run.dir=/proc/nope")


def test_an_option_without_meaning_is_refused_before_a_game_has_connected() -> None:
    with pytest.raises(UserError, match=r"eval\.every_s would evaluate in an environment"):
        run_games(None, BIND, "eval.every_s=30")


@pytest.mark.parametrize("port", ["*", "0"])
def test_a_port_that_the_system_chooses_is_chosen_once(
    port: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses: list[str | None] = []

    def note_addresses(*_: Any, make_specs: MakeSpecs, **__: Any) -> int:
        specs = make_specs(played("cartpole"), RUNTIME)
        addresses.extend(spec.address for spec in specs if spec.listens)
        return 0

    monkeypatch.setattr("penstock.launch.serve_env.print_result", note_addresses)
    run_games("cartpole", f"tcp://127.0.0.1:{port}")
    [address] = addresses
    assert address is not None
    assert int(address.rpartition(":")[2]) > 0


def test_a_folder_named_games_is_no_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("games").mkdir()
    assert played("games").env.id == "games"


def test_learners_without_ports_are_refused_before_a_game_has_connected() -> None:
    with pytest.raises(UserError, match="the last port is 65535"):
        run_games(None, "tcp://127.0.0.1:65535", "learner.count=2", "actors.count=2")


def test_a_new_run_of_games_has_the_options_of_a_run_by_its_file(tmp_path: Path) -> None:
    config = played("cartpole", "run.dir=other")
    file = tmp_path / "config.yaml"
    file.write_text(dump(config))
    with pytest.raises(UserError, match=rf"or give {file} run\.dir=OTHER for a new run"):
        played(str(tmp_path))
    assert played(str(file), "run.dir=other") == config
