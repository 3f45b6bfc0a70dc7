"""The pool of a league: earlier weights of its lines, on the disk, for all of its runs.

    POOL/members/0f3a.../checkpoint.safetensors    weights, in a folder named by their content
    POOL/main.json                                 the list of the line `main`

A line is what one run trains, and its list has one writer, the first learner of that run, which
locks the file `main.lock`. Members are never changed and never removed. A member's file is written
before the list that names it, and a list is replaced as a whole, so a reader never finds a part of
a member. Adding the same weights again changes nothing.

A line that others play against may also show its newest weights, which are replaced from time to
time (`PolicyPool.set_latest`). Imports no torch.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.configs.sections import EnvConfig
from penstock.core.files import DAMAGE, open_private, read_regular, try_lock, write_atomic
from penstock.core.notes import note_logger
from penstock.core.params import Float32, ParamLayout
from penstock.learner.checkpoints import checkpoint_format
from penstock.learner.checkpoints.checkpoint_format import Checkpoint, DamagedCheckpointError
from penstock.learner.checkpoints.checkpoint_history import ENV

MEMBERS = "members"
"""Folder of the weights."""
LOADED = 16
"""Members whose weights stay in memory."""
RETIRED = 2
"""Earlier latest weights of a line whose files are kept, for readers that still load them."""
MAY_PASS = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, which may have room later; with others a folder is no place for a pool."""

logger = note_logger(__name__)


class PoolMember(NamedTuple):
    """One frozen policy of the pool."""

    id: str
    """16 hexadecimal digits of the SHA-256 of its weights."""
    line: str
    """The line that it comes from."""
    steps: int
    """Agent steps that it was trained on."""
    time_s: float
    """Seconds of training before it."""
    initial: bool
    """Whether it is its line's policy before training."""


class LineList(NamedTuple):
    """The content of a line's list."""

    members: tuple[PoolMember, ...] = ()
    """The oldest first."""
    latest: PoolMember | None = None
    """The newest weights that the line shows, which are no member."""
    retired: tuple[str, ...] = ()
    """Ids of what was `latest` before and still has a file, the oldest first."""


class PolicyPool:
    """The pool in one folder, which may not exist yet. Not thread-safe.

    pool = PolicyPool(pool_folder(config, run_dir))
    member = pool.add("main", checkpoint, steps=0, time_s=0.0, initial=True)
    weights = pool.weights(member, layout)
    """

    def __init__(
        self,
        folder: Path,
        event: Callable[..., object] = lambda kind, text, **fields: logger.info("%s", text),
    ) -> None:
        """``event`` is called, as `RoleContext.event`, for a member that cannot be read."""
        self.folder = folder
        self._event = event
        self._faulty: set[str] = set()
        """Ids of members that an event was written about."""
        self._loaded: OrderedDict[str, Float32] = OrderedDict()
        """Weights by id, those used last at the end."""
        self._lists: dict[str, tuple[tuple[int, int], LineList]] = {}
        """What was read of each list, with inode and time of change of its file."""
        self._locks: dict[str, int] = {}
        """Descriptors that hold the locks of lines, by name."""

    def claim(self, line: str) -> None:
        """Become the one writer of a line's list, until `close` or the end of this process.

        A full disk, or one without locks, leaves the line to whoever writes it.

        Raises:
            UserError: if another run is its writer, or the folder cannot be written.
        """
        if line in self._locks:
            return
        path = self.folder / f"{line}.lock"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = open_private(path, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            if error.errno in MAY_PASS:
                return
            raise UserError(
                f"the pool {self.folder} cannot be written ({error.strerror}), and the members of "
                f"line {line} belong there; set league.pool to another folder"
            ) from error

        self._locks[line] = descriptor
        is_locked = True
        with suppress(OSError):
            is_locked = try_lock(descriptor)
        if not is_locked:
            self.close()
            raise UserError(
                f"line {line} of the pool {self.folder} is trained by another run, which has not "
                "ended; wait for it, or set league.name to another line"
            )

    def close(self) -> None:
        """Leave the lines to other runs."""
        while self._locks:
            os.close(self._locks.popitem()[1])

    def lines(self) -> list[str]:
        """Returns the names of the lines that have a list, sorted."""
        return sorted(path.stem for path in self.folder.glob("*.json"))

    def members(self, line: str | None = None) -> list[PoolMember]:
        """Returns the members of a line, the oldest first; None: those of all lines, line by line.

        The list is empty for a line that is not in the pool. Raises UserError for a list that is
        damaged.
        """
        lines = self.lines() if line is None else [line]
        return [member for name in lines for member in self._read(name).members]

    def latest(self, line: str) -> PoolMember | None:
        """Returns the newest weights that a line shows beside its members; None without any.

        Raises UserError for a list that is damaged.
        """
        return self._read(line).latest

    def add(
        self,
        line: str,
        checkpoint: Checkpoint,
        *,
        steps: int,
        time_s: float,
        initial: bool = False,
    ) -> PoolMember:
        """Add weights to the end of a line's list, unless they are in it.

        A policy before training takes the place of others before training, where a run has begun
        again before it has added anything else.

        Args:
            line: the line that this process trains.
            checkpoint: the weights, and in its meta the environment and its spaces
                (`checkpoint_history.ENV`, `checkpoint_spaces.SPACES`).
            steps: agent steps that the weights were trained on.
            time_s: seconds of training before them.
            initial: whether they are the policy before training.

        Returns:
            The member, or the one of the same weights that was in the list.

        Raises:
            UserError: if it cannot be written, or the list is damaged. The list is as before then.
        """
        content = self._read(line)
        new_member = PoolMember(member_id(checkpoint.weights), line, steps, time_s, initial)
        for member in content.members:
            if member.id == new_member.id:
                return member

        begins_anew = initial and all(member.initial for member in content.members)
        earlier_members = () if begins_anew else content.members
        self._save(new_member, checkpoint)
        self._write(line, content._replace(members=(*earlier_members, new_member)))
        return new_member

    def set_latest(
        self, line: str, checkpoint: Checkpoint, *, steps: int, time_s: float
    ) -> PoolMember:
        """Show weights as the newest of a line, in place of those that it showed before.

        Arguments and errors are those of `add`.
        """
        content = self._read(line)
        latest = PoolMember(member_id(checkpoint.weights), line, steps, time_s, initial=False)
        if content.latest is not None and content.latest.id == latest.id:
            return content.latest

        self._save(latest, checkpoint)
        shown = () if content.latest is None else (content.latest.id,)
        retired = [id_ for id_ in (*content.retired, *shown) if id_ != latest.id]
        self._write(line, content._replace(latest=latest, retired=tuple(retired[-RETIRED:])))

        # Weights that some line has as a member stay, whatever else they were.
        member_ids = {member.id for member in self.members()}
        for id_ in retired[:-RETIRED]:
            if id_ not in member_ids:
                shutil.rmtree(self.folder / MEMBERS / id_, ignore_errors=True)
        return latest

    def weights(self, member: PoolMember, layout: ParamLayout) -> Float32 | None:
        """Returns the weights of a member, float32 ``[layout.size]``, which the caller only reads.

        None where its file is damaged or missing, which one event reports.

        Raises:
            UserError: if they are of another network than ``layout``.
        """
        weights = self._loaded.get(member.id)
        if weights is not None:
            self._loaded.move_to_end(member.id)
            return weights

        folder = self.checkpoint_folder(member)
        try:
            checkpoint = checkpoint_format.load(folder)
            if member_id(checkpoint.weights) != member.id:
                path = folder / checkpoint_format.FILE
                raise DamagedCheckpointError(f"{path} holds other weights than its name says")
        except UserError as error:
            self._on_faulty(member, error)
            return None
        checkpoint_format.check_layout(folder / checkpoint_format.FILE, checkpoint.layout, layout)

        self._loaded[member.id] = checkpoint.weights
        if len(self._loaded) > LOADED:
            self._loaded.popitem(last=False)
        return checkpoint.weights

    def check_member(
        self, member: PoolMember, layout: ParamLayout, env: EnvConfig | None = None
    ) -> None:
        """Raise UserError if a member is of another network than ``layout``, or another game.

        Only the head of its file is read. Nothing is known of a member that is damaged or missing.
        ``env`` is the run's environment; None takes members of any.
        """
        folder = self.checkpoint_folder(member)
        if not checkpoint_format.exists(folder):
            return
        meta: Mapping[str, Any] = {}
        with suppress(DamagedCheckpointError):
            meta = checkpoint_format.read_meta(folder, layout)
        if env is not None and not env.is_same(meta.get(ENV, {})):
            raise UserError(
                f"member {member.id} of line {member.line} in the pool {self.folder} has played "
                f"another game than {env.id}, or with other settings (env.*); set env.* as they "
                "were, or league.pool to another folder"
            )

    def checkpoint_folder(self, member: PoolMember) -> Path:
        """Returns the folder of a member's checkpoint, as `checkpoint_format.load` takes it."""
        return self.folder / MEMBERS / member.id

    def _on_faulty(self, member: PoolMember, error: UserError) -> None:
        """Report, once, that a member cannot be used."""
        if member.id in self._faulty:
            return
        self._faulty.add(member.id)
        fault = error.fault if isinstance(error, DamagedCheckpointError) else str(error)
        text = f"member {member.id} of line {member.line} is left out: {fault}"
        self._event("pool", text, member=member.id, line=member.line)

    def _save(self, member: PoolMember, checkpoint: Checkpoint) -> None:
        """Write a member's file. Two lines may write the same weights at once."""
        temporary = f".{member.line}.tmp"
        checkpoint_format.save(self.checkpoint_folder(member), checkpoint, temporary)

    def _read(self, line: str) -> LineList:
        """Returns the list of a line; an empty one if there is none.

        Raises UserError for one that is damaged or cannot be read.
        """
        path = self._path_of(line)
        try:
            stat = path.stat()
            age = (stat.st_ino, stat.st_mtime_ns)
            if line in self._lists and self._lists[line][0] == age:
                return self._lists[line][1]
            content = _from_json(line, json.loads(read_regular(path)))
        except FileNotFoundError:
            return LineList()
        except DAMAGE as error:
            raise UserError(
                f"{path} is no list of members ({error}); restore it, or set league.pool to "
                "another folder"
            ) from error
        self._lists[line] = (age, content)
        return content

    def _write(self, line: str, content: LineList) -> None:
        """Replace the list of a line. Raises UserError if it cannot be written."""
        path = self._path_of(line)
        try:
            write_atomic(path, json.dumps(_to_json(content), indent=1) + "\n")
        except OSError as error:
            raise UserError(
                f"{path} could not be written ({error.strerror}), and the list before it is whole; "
                "free some space or set league.pool to another disk"
            ) from error

    def _path_of(self, line: str) -> Path:
        """Returns the path of a line's list."""
        return self.folder / f"{line}.json"


def member_id(weights: Float32) -> str:
    """Returns the id of a member with these weights."""
    return hashlib.sha256(weights.tobytes()).hexdigest()[:16]


def pool_folder(config: Config, run_dir: Path) -> Path:
    """Returns the folder of a run's pool: `league.pool`, or `pool` in the run's folder."""
    return run_dir / "pool" if config.league.pool is None else Path(config.league.pool)


def _to_json(content: LineList) -> dict[str, Any]:
    """Returns a list as JSON; the line is that of the file."""
    latest = content.latest
    return {
        "members": [_member_to_json(member) for member in content.members],
        "latest": None if latest is None else _member_to_json(latest),
        "retired": content.retired,
    }


def _from_json(line: str, value: dict[str, Any]) -> LineList:
    """The inverse of `_to_json`. Raises one of `DAMAGE` for a value that it has not made."""
    latest = value["latest"]
    return LineList(
        members=tuple(PoolMember(line=line, **entry) for entry in value["members"]),
        latest=None if latest is None else PoolMember(line=line, **latest),
        retired=tuple(value["retired"]),
    )


def _member_to_json(member: PoolMember) -> dict[str, Any]:
    """Returns a member as JSON, without its line."""
    return {name: value for name, value in member._asdict().items() if name != "line"}
