"""Limits of this process's control groups, version 1 or 2: cores, memory, and kills for lack of it.

A limit of any enclosing group applies too, so the smallest on the way up counts. Inside a container
the path may name groups that only the host sees; groups that exist below the mount are read.

Functions take the folder where control groups are mounted, and the file that names the groups of
this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNT = Path("/sys/fs/cgroup")
OURS = Path("/proc/self/cgroup")
NO_LIMIT = 1 << 60  # version 1 expresses "none" by a huge number


def cores(mount: Path = MOUNT, ours: Path = OURS) -> float | None:
    """Returns the number of cores that the quota allows; None without a quota."""
    quotas = [
        float(quota_us) / float(period_us)
        for quota_us, period_us in _cpu_quotas(mount, ours)
        if quota_us not in ("max", "-1")
    ]
    return min(quotas, default=None)


def memory_nbytes(mount: Path = MOUNT, ours: Path = OURS) -> int | None:
    """Returns the bytes of memory that the groups allow; None without a limit."""
    texts = _read(mount, ours, "memory", ("memory.max", "memory.limit_in_bytes"))
    limits = [int(text) for text in texts if text != "max"]
    return min((limit for limit in limits if limit < NO_LIMIT), default=None)


def memory_left_nbytes(mount: Path = MOUNT, ours: Path = OURS) -> int | None:
    """Returns the bytes of memory that the groups still allow; None without a limit.

    Pages of files count as free, since the kernel can drop them.
    """
    # The files of version 2, then those of version 1.
    file_names = (
        ("memory.max", "memory.current"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
    )
    free_nbytes: list[int] = []
    for group in _groups(mount, ours, "memory"):
        for limit_name, usage_name in file_names:
            try:
                nbytes = _free_nbytes(group, limit_name, usage_name)
            except OSError:  # the files of the other version, or of a group without limits
                continue
            if nbytes is not None:
                free_nbytes.append(nbytes)
    return min(free_nbytes, default=None)


def _free_nbytes(group: Path, limit_name: str, usage_name: str) -> int | None:
    """Returns the bytes of memory that one group still allows; None without a limit.

    Raises OSError if it lacks a file.
    """
    limit = (group / limit_name).read_text().strip()
    if limit == "max" or int(limit) >= NO_LIMIT:
        return None

    lines = (group / "memory.stat").read_text().splitlines()
    stat = dict(line.split() for line in lines)
    file_nbytes = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    used_nbytes = int((group / usage_name).read_text())
    return int(limit) - used_nbytes + file_nbytes


def oom_kills(mount: Path = MOUNT, ours: Path = OURS) -> int | None:
    """Returns how many processes of this group were killed for lack of memory so far.

    None if the kernel does not count them.
    """
    for text in _read(mount, ours, "memory", ("memory.events", "memory.oom_control")):
        counts = dict(line.split() for line in text.splitlines())
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return None


def _cpu_quotas(mount: Path, ours: Path) -> Iterator[tuple[str, str]]:
    """Yield quota and period of each group, in microseconds; "max" or "-1" is no quota."""
    # Version 2 has both in one file.
    for text in _read(mount, ours, "cpu", ("cpu.max",)):
        quota, period = text.split()
        yield quota, period

    # Version 1 has a file for each.
    quotas = _read(mount, ours, "cpu", ("cpu.cfs_quota_us",))
    periods = _read(mount, ours, "cpu", ("cpu.cfs_period_us",))
    yield from zip(quotas, periods, strict=False)


def _read(mount: Path, ours: Path, controller: str, names: tuple[str, ...]) -> Iterator[str]:
    """Yield the contents of those files ``names`` that exist in our groups of a controller.

    The innermost group comes first.
    """
    for group in _groups(mount, ours, controller):
        for name in names:
            try:
                yield (group / name).read_text().strip()
            except OSError:  # the root group has no limits
                continue


def _groups(mount: Path, ours: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of our groups of a controller, from the innermost up."""
    try:
        lines = ours.read_text().splitlines()
    except OSError:
        return

    for line in lines:
        # Version 2 has one hierarchy, and a line without controllers. Version 1 mounts each
        # hierarchy in a folder with the name of its controllers, or of one of them.
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = mount
        elif controller in controllers.split(","):
            root = mount / controllers if (mount / controllers).exists() else mount / controller
        else:
            continue

        group = root / path.lstrip("/")
        yield group
        while group != root:
            group = group.parent
            yield group
