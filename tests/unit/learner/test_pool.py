"""The pool: what is added, what is read, and what becomes of damage and full disks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from full_disk import full_disk
from penstock.configs.errors import UserError
from penstock.configs.load import resolve
from penstock.configs.sections import EnvConfig
from penstock.core.params import ParamLayout
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import FILE, Checkpoint
from penstock.learner.pool import LOADED, PolicyPool, pool_folder

LAYOUT = ParamLayout((("policy.weight", (3, 4)), ("policy.bias", (4,))))


def checkpoint(value: float) -> Checkpoint:
    """Returns weights that are all ``value``."""
    return Checkpoint(LAYOUT, np.full(LAYOUT.size, value, np.float32), meta={"env": {"id": "kuhn"}})


def add(pool: PolicyPool, value: float, line: str = "main", **fields: Any) -> Any:
    """Adds weights that are all ``value``, after as many steps."""
    return pool.add(line, checkpoint(value), steps=int(value), time_s=value / 2, **fields)


def damage(pool: PolicyPool, member: Any) -> None:
    """Flips a bit of a member's weights on the disk."""
    path = pool.checkpoint_folder(member) / FILE
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_a_folder_that_does_not_exist_is_an_empty_pool(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path / "pool")

    assert pool.lines() == []
    assert pool.members() == []
    assert pool.members("main") == []
    assert pool.latest("main") is None


def test_members_are_in_the_order_in_which_they_were_added_also_to_another_reader(
    tmp_path: Path,
) -> None:
    pool = PolicyPool(tmp_path / "pool")
    first = add(pool, 7, initial=True)
    second = add(pool, 3)
    other = add(pool, 5, line="exploiter")

    reader = PolicyPool(tmp_path / "pool")
    assert reader.members("main") == [first, second]
    assert reader.members() == [other, first, second]
    assert reader.lines() == ["exploiter", "main"]
    assert (second.steps, second.time_s, second.initial) == (3, 1.5, False)


def test_a_member_that_is_added_later_is_seen_by_a_reader_that_has_read_before(
    tmp_path: Path,
) -> None:
    pool = PolicyPool(tmp_path)
    reader = PolicyPool(tmp_path)
    add(pool, 1)
    reader.members()

    second = add(pool, 2)

    assert reader.members()[-1] == second


def test_the_same_weights_are_added_once(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    first = add(pool, 1, initial=True)
    files = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}

    again = pool.add("main", checkpoint(1), steps=99, time_s=9.0)

    assert again == first
    assert pool.members() == [first]
    assert files == {path: path.stat().st_mtime_ns for path in files}


def test_lines_that_begin_with_the_same_weights_have_a_member_each(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    main = add(pool, 1, initial=True)
    exploiter = add(pool, 1, line="exploiter", initial=True)

    assert main.id == exploiter.id
    assert pool.members() == [exploiter, main]


def test_the_weights_of_a_member_are_those_that_were_added(tmp_path: Path) -> None:
    member = add(PolicyPool(tmp_path), 4)

    weights = PolicyPool(tmp_path).weights(member, LAYOUT)

    np.testing.assert_array_equal(weights, np.full(16, 4, np.float32))


def test_a_member_is_a_checkpoint_with_its_environment(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    stored = checkpoint_format.load(pool.checkpoint_folder(add(pool, 4)))

    assert stored.layout == LAYOUT
    assert stored.meta == {"env": {"id": "kuhn"}}


@pytest.mark.parametrize("fault", ["flipped bit", "other weights", "missing"])
def test_a_faulty_member_is_none_with_one_event(tmp_path: Path, fault: str) -> None:
    member = add(PolicyPool(tmp_path), 1)
    events: list[str] = []
    pool = PolicyPool(tmp_path, event=lambda kind, text, **fields: events.append(text))
    folder = pool.checkpoint_folder(member)
    if fault == "flipped bit":
        damage(pool, member)
    elif fault == "other weights":
        shutil.copy(pool.checkpoint_folder(add(pool, 2)) / FILE, folder / FILE)
    else:
        shutil.rmtree(folder)

    assert pool.weights(member, LAYOUT) is None
    assert pool.weights(member, LAYOUT) is None
    assert len(events) == 1
    assert events[0].startswith(f"member {member.id} of line main is left out: ")


def test_a_member_of_another_network_is_refused(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    member = add(pool, 1)
    other = ParamLayout((("policy.weight", (3, 5)), ("policy.bias", (5,))))

    with pytest.raises(UserError, match=r"of another network: it has policy.weight \[3, 4\] where"):
        pool.weights(member, other)


def test_weights_that_were_read_lately_stay_in_memory(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    members = [add(pool, value) for value in range(LOADED + 1)]
    first, *others = members
    weights = pool.weights(first, LAYOUT)
    for member in others[:-1]:
        pool.weights(member, LAYOUT)

    assert pool.weights(first, LAYOUT) is weights
    pool.weights(others[-1], LAYOUT)
    assert pool.weights(first, LAYOUT) is weights


def test_a_full_disk_leaves_the_list_as_it_was(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    first = add(pool, 1)

    with full_disk(), pytest.raises(UserError, match="could not be written"):
        add(pool, 2)

    assert PolicyPool(tmp_path).members() == [first]
    assert pool.weights(first, LAYOUT) is not None
    second = add(pool, 2)
    assert PolicyPool(tmp_path).members() == [first, second]


def test_a_list_that_cannot_be_written_is_as_before_and_the_member_can_be_added_later(
    tmp_path: Path,
) -> None:
    pool = PolicyPool(tmp_path)
    first = add(pool, 1)
    obstacle = tmp_path / "main.json.tmp"  # the name under which a list is written
    obstacle.mkdir()

    with pytest.raises(UserError, match=r"main.json could not be written"):
        add(pool, 2)

    assert PolicyPool(tmp_path).members() == [first]
    obstacle.rmdir()
    second = add(pool, 2)
    assert PolicyPool(tmp_path).members() == [first, second]


def test_a_damaged_list_is_refused_and_never_replaced(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    add(pool, 1)
    path = tmp_path / "main.json"
    path.write_text(path.read_text()[:-20])

    with pytest.raises(UserError, match=r"main.json is no list of members"):
        PolicyPool(tmp_path).members()
    text = path.read_text()
    with pytest.raises(UserError, match=r"main.json is no list of members"):
        PolicyPool(tmp_path).add("main", checkpoint(2), steps=2, time_s=1.0)
    assert path.read_text() == text


def test_the_latest_weights_are_no_member(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    first = add(pool, 1)
    latest = pool.set_latest("main", checkpoint(2), steps=2, time_s=1.0)

    reader = PolicyPool(tmp_path)
    assert reader.members() == [first]
    assert reader.latest("main") == latest
    np.testing.assert_array_equal(reader.weights(latest, LAYOUT), np.full(16, 2, np.float32))


def test_three_latest_weights_are_kept_and_members_always(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    member = add(pool, 1)
    latest = [
        pool.set_latest("main", checkpoint(value), steps=value, time_s=1.0) for value in range(1, 7)
    ]

    folders = {path.name for path in (tmp_path / "members").iterdir()}
    assert folders == {member.id, *(each.id for each in latest[-3:])}


def test_a_member_that_was_the_latest_stays_when_it_is_replaced(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    pool.set_latest("main", checkpoint(1), steps=1, time_s=1.0)
    member = add(pool, 1)
    for value in range(2, 6):
        pool.set_latest("main", checkpoint(value), steps=value, time_s=1.0)

    assert PolicyPool(tmp_path).weights(member, LAYOUT) is not None


def test_the_pool_is_in_the_runs_folder_unless_it_is_named(tmp_path: Path) -> None:
    assert pool_folder(resolve("cartpole", []), tmp_path) == tmp_path / "pool"
    assert pool_folder(resolve("cartpole", ["league.pool=/a/b"]), tmp_path) == Path("/a/b")


def test_a_line_has_one_run_that_writes_it(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path / "pool")
    pool.claim("main")
    pool.claim("main")

    PolicyPool(tmp_path / "pool").claim("exploiter")
    with pytest.raises(UserError, match=r"line main .* is trained by another run"):
        PolicyPool(tmp_path / "pool").claim("main")

    pool.close()
    PolicyPool(tmp_path / "pool").claim("main")


def test_a_folder_in_which_no_pool_can_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(UserError, match="cannot be written"):
        PolicyPool(tmp_path / "file").claim("main")
    with pytest.raises(UserError, match=r"cannot be written \(Not a directory\)"):
        PolicyPool(tmp_path / "file/pool").claim("main")


def test_a_list_that_cannot_be_looked_at_is_no_empty_one(tmp_path: Path) -> None:
    (tmp_path / "pool").symlink_to(tmp_path / "pool")

    with pytest.raises(UserError, match="is no list of members"):
        add(PolicyPool(tmp_path / "pool"), 1)


def test_a_member_of_another_game_with_the_same_network_is_refused(tmp_path: Path) -> None:
    pool = PolicyPool(tmp_path)
    member = add(pool, 1)

    pool.check_member(member, LAYOUT, EnvConfig(id="kuhn"))
    pool.check_member(member, LAYOUT)
    with pytest.raises(UserError, match="has played another game than leduc"):
        pool.check_member(member, LAYOUT, EnvConfig(id="leduc"))
