"""Where actors of this host find a learner that was started alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.configs.errors import UserError
from penstock.transport import addresses


@pytest.mark.parametrize("address", ["tcp://10.0.0.1:7700", "ipc:///run/wire"])
def test_an_address_is_taken_as_it_is(address: str) -> None:
    assert addresses.address_of(address) == address


def test_a_folder_stands_for_the_socket_in_it(tmp_path: Path) -> None:
    run = tmp_path / "run"  # which need not be there yet
    assert addresses.address_of(str(run)) == f"ipc://{run}/sockets/wire"


def test_a_long_path_is_taken_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / ("x" * 100)
    deep.mkdir()
    monkeypatch.chdir(deep)
    assert addresses.address_in_run(deep / "run") == "ipc://run/sockets/wire"
    with pytest.raises(UserError, match="longer than the 102 bytes"):
        addresses.address_in_run(deep / ("y" * 100))


def test_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    for _ in range(2):
        addresses.make_socket_folder(tmp_path)
        assert (tmp_path / "sockets").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "sockets").touch()
    with pytest.raises(UserError, match="cannot be created"):
        addresses.make_socket_folder(tmp_path)


def test_so_is_one_that_is_open_or_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "a/sockets").mkdir(parents=True)
    (tmp_path / "a/sockets").chmod(0o755)
    (tmp_path / "b").mkdir()
    (tmp_path / "b/sockets").symlink_to(tmp_path / "a/sockets")
    for run in ("a", "b"):
        with pytest.raises(UserError, match="must belong to this user and have mode 0700"):
            addresses.make_socket_folder(tmp_path / run)
    assert (tmp_path / "a/sockets").stat().st_mode & 0o777 == 0o755
