"""Learners on several machines: rank and store from options or torchrun, and their errors."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import pytest

from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.core.role import StoreAddress
from penstock.launch import join_note
from penstock.launch.machines import (
    LearnerPlace,
    check_place,
    check_store,
    choose_run_dir,
    find_place,
    is_loopback,
    own_address,
)

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "1",
    "WORLD_SIZE": "4",
    "MASTER_ADDR": "node7",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
FAR = LearnerPlace(1, 2, StoreAddress("10.0.0.1", 29500))


def config(*overrides: str) -> Any:
    return resolve("CartPole-v1", ["learner.count=2", *overrides])


@pytest.fixture
def resolves(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What names resolve to; the rest does not."""
    known = {"10.0.0.1": "10.0.0.1", "127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1"}

    def look_up(host: str, *_: Any, **__: Any) -> list[Any]:
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (known[host], 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    monkeypatch.setattr(socket, "gethostname", lambda: "box")
    return known


@pytest.mark.parametrize(
    ("bind", "options", "command"),
    [
        ("ipc:///run/w", ["env.id=g:make"], "ipc:///run/w"),
        ("tcp://127.0.0.1:7700", [], "tcp://127.0.0.1:7700"),
        (
            "tcp://127.0.0.1:7700",
            ["env.id=g:make", "env.wrappers=[{g:W: {path: a/b}}]"],
            "tcp://127.0.0.1:7700 --allow g:make --allow g:W --allow a/b",
        ),
        ("tcp://10.0.0.9:7701", ["transport.insecure=true"], "tcp://10.0.0.9:7701 --insecure"),
        (
            "tcp://0.0.0.0:7700",
            ["transport.curve=my keys"],
            "tcp://10.0.0.7:7700 --curve 'my keys'; other hosts need learner.key and "
            "actor.key_secret of my keys",
        ),
        ("tcp://*:7700", ["transport.insecure=true"], "tcp://10.0.0.7:7700 --insecure"),
        ("tcp://127.0.0.1:*", [], None),
        ("tcp://lo:7700", ["transport.insecure=true"], None),
    ],
)
def test_join_note_has_every_option_that_an_actor_needs(
    bind: str, options: list[str], command: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join_note, "own_host", lambda: "10.0.0.7")
    made = resolve("CartPole-v1", [f"transport.bind={bind}", *options])
    note = f"start actors with: penstock actor --connect {command}" if command else ""
    assert join_note.join_note(made, bind) == note


def test_rank_world_and_store_given_by_hand_are_used() -> None:
    assert find_place(1, 4, "10.0.0.1:29500", {}) == LearnerPlace(
        1, 4, StoreAddress("10.0.0.1", 29500)
    )
    assert find_place(0, 1, "[fd00::7]:29500", {}) == LearnerPlace(
        0, 1, StoreAddress("fd00::7", 29500)
    )


def test_no_options_and_no_torchrun_mean_a_single_command() -> None:
    # MPI and Slurm set some of these too.
    assert find_place(None, None, None, {"RANK": "3", "WORLD_SIZE": "4"}) is None


def test_torchrun_variables_give_rank_world_and_store() -> None:
    place = find_place(None, None, None, TORCHRUN)
    assert place == LearnerPlace(
        1, 4, StoreAddress("node7", 29400, served=True, attempt=2), torchrun=True
    )


@pytest.mark.parametrize(
    ("rank", "world", "store", "environ", "sentence"),
    [
        (1, None, "h:1", {}, "and --world is missing; give all three, such as --rank 0"),
        (None, 2, None, {}, "and --rank, --store is missing"),
        (
            2,
            2,
            "h:1",
            {},
            "--rank 2 is not below --world 2: ranks count from 0; give --rank 0 to 1",
        ),
        (-2, 2, "h:1", {}, "--rank -2 is negative: ranks count from 0; give --rank 0 to 1"),
        (0, 0, "h:1", {}, "--world is 0; it must be a whole number of at least 1"),
        (
            0,
            2,
            "10.0.0.1",
            {},
            "--store 10.0.0.1 is not a host and port; give the address of rank 0",
        ),
        (0, 2, "h:70000", {}, "--store h:70000 is not a host and port"),
        (0, None, None, TORCHRUN, "torchrun sets the rank; leave out --rank"),
        (None, None, None, {**TORCHRUN, "RANK": "x"}, "is not valid in the environment of"),
        (None, None, None, {**TORCHRUN, ATTEMPT: "x"}, "'x' is not valid in the environment of"),
        (
            None,
            None,
            None,
            {"TORCHELASTIC_RUN_ID": "1"},
            "'RANK' is not valid in the environment of",
        ),
    ],
)
def test_incomplete_or_invalid_machine_options_are_refused(
    rank: int | None, world: int | None, store: str | None, environ: dict[str, str], sentence: str
) -> None:
    with pytest.raises(UserError, match=re.escape(sentence)):
        find_place(rank, world, store, environ)


def test_host_name_that_resolves_to_loopback_is_refused(resolves: dict[str, str]) -> None:
    resolves["box"] = "127.0.1.1"
    with pytest.raises(UserError) as error:
        check_place(FAR, config(), {})
    assert str(error.value).startswith(
        "this machine's name box resolves to 127.0.1.1, so learners on other machines cannot "
        "reach it; set learner.reduce.interface to the interface of the shared network, one of "
    )
    assert "lo" in str(error.value).rpartition("one of ")[2].split(", ")


def test_unresolvable_host_name_is_refused(resolves: dict[str, str]) -> None:
    with pytest.raises(UserError, match="this machine's name box cannot be resolved, so"):
        check_place(FAR, config(), {})


def test_loopback_is_accepted_with_an_interface_or_on_one_host(resolves: dict[str, str]) -> None:
    resolves["box"] = "127.0.1.1"
    check_place(FAR, config("learner.reduce.interface=lo"), {})
    check_place(FAR, config(), {"GLOO_SOCKET_IFNAME": "lo"})
    check_place(FAR, config(), {"NCCL_SOCKET_IFNAME": "^docker"})
    check_place(LearnerPlace(1, 2, StoreAddress("localhost", 29500)), config(), {})
    check_place(LearnerPlace(0, 1, StoreAddress("10.0.0.1", 29500)), config(), {})
    resolves["box"] = "10.0.0.2"
    check_place(FAR, config(), {})


def test_unresolvable_store_host_is_refused(resolves: dict[str, str]) -> None:
    with pytest.raises(UserError, match="the host nowhere of --store cannot be resolved"):
        check_place(LearnerPlace(1, 2, StoreAddress("nowhere", 1)), config(), {})


def test_missing_network_interface_is_refused(resolves: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"interface eth77 does not exist; this machine has .*lo"):
        check_place(FAR, config("learner.reduce.interface=eth77"), {})


def test_missing_network_interface_of_the_environment_is_refused(resolves: dict[str, str]) -> None:
    with pytest.raises(UserError, match=r"GLOO_SOCKET_IFNAME eth77 does not exist; this machine"):
        check_place(FAR, config(), {"GLOO_SOCKET_IFNAME": "lo,eth77"})
    check_place(FAR, config("learner.reduce.interface=lo"), {"GLOO_SOCKET_IFNAME": "eth77"})


@pytest.mark.parametrize("other", ["127.0.0.1", "127.0.0.2", "::1"])
def test_own_address_has_the_family_of_the_other_address(other: str) -> None:
    own = own_address(other)
    assert is_loopback(own)
    assert (":" in own) == (":" in other)


def test_unreachable_store_host_is_refused_in_one_sentence() -> None:
    with pytest.raises(
        UserError, match=r"no way to .*, the host of --store \(.*\); give an address"
    ):
        own_address("no-such-host.invalid")


def test_torchrun_needs_a_named_run_folder() -> None:
    place = LearnerPlace(0, 1, StoreAddress("10.0.0.1", 29500), torchrun=True)
    with pytest.raises(UserError, match=r"must find its checkpoint; set run\.dir"):
        check_place(place, config(), {})
    check_place(place, config("run.dir=somewhere"), {})


def test_auto_numbers_are_refused_for_learners_on_several_machines() -> None:
    with pytest.raises(
        UserError, match=r"actors\.envs auto .* 2 learners need the same number; set actors\.envs"
    ):
        check_place(FAR, config("actors.envs=auto"), {})
    with pytest.raises(UserError, match=r"transport\.connectors auto .* 2 learners need the same"):
        check_place(FAR, config("transport.connectors=auto"), {})
    alone = LearnerPlace(0, 1, StoreAddress("127.0.0.1", 29500))
    options = ["actors.envs=auto", "transport.connectors=auto"]
    check_place(alone, resolve("CartPole-v1", options), {})


def test_each_rank_writes_to_a_folder_of_its_own() -> None:
    run = Path("run")
    first, second = (LearnerPlace(rank, 2, StoreAddress("h", 1)) for rank in range(2))
    assert choose_run_dir(first, run, "must") == (run, "must")
    assert choose_run_dir(second, run, "must") == (run / "rank-1", "auto")
    assert choose_run_dir(second, run, "no") == (run / "rank-1", "no")
    by_torchrun = LearnerPlace(0, 2, StoreAddress("h", 1), torchrun=True)
    assert choose_run_dir(by_torchrun, run, "no") == (run, "auto")


@pytest.mark.parametrize(
    ("place", "trusted", "refused"),
    [
        (LearnerPlace(0, 2, StoreAddress("127.0.0.1", 29500)), False, False),
        (LearnerPlace(0, 2, StoreAddress("localhost", 29500)), False, False),
        (LearnerPlace(0, 2, StoreAddress("10.0.0.1", 29500)), False, True),
        (LearnerPlace(1, 2, StoreAddress("10.0.0.1", 29500)), False, True),
        (LearnerPlace(0, 2, StoreAddress("10.0.0.1", 29500)), True, False),
        (
            LearnerPlace(0, 2, StoreAddress("10.0.0.1", 29500, served=True), torchrun=True),
            False,
            False,
        ),
    ],
)
def test_store_on_another_host_needs_explicit_consent(
    resolves: dict[str, str], place: LearnerPlace, trusted: bool, refused: bool
) -> None:
    if not refused:
        check_store(place, trusted=trusted)
        return
    with pytest.raises(
        UserError, match=r"--store 10\.0\.0\.1:29500 can be reached from other hosts"
    ):
        check_store(place, trusted=trusted)


def test_store_name_that_is_loopback_on_rank_0_is_refused(resolves: dict[str, str]) -> None:
    resolves["box"] = "127.0.1.1"
    store = StoreAddress("box", 29500)
    with pytest.raises(
        UserError, match=r"--store box:29500 resolves to 127\.0\.1\.1 on this machine"
    ):
        check_place(LearnerPlace(0, 2, store), config("learner.reduce.interface=lo"), {})
    check_place(LearnerPlace(1, 2, store), config("learner.reduce.interface=lo"), {})
