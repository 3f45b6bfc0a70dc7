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
    """Cores that the quota allows, or None without one."""
    quotas = [float(q) / float(p) for q, p in _cpu_max(mount, ours) if q not in ("max", "-1")]
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
    left: list[int] = []
    for group in _groups(mount, ours, "memory"):
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                allowed = (group / limit).read_text().strip()
                if allowed == "max" or int(allowed) >= NO_LIMIT:
                    continue
                lines = (group / "memory.stat").read_text().splitlines()
                stat = dict(line.split() for line in lines)
                cached = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
                left.append(int(allowed) - int((group / used).read_text()) + cached)
            except OSError:
                continue
    return min(left, default=None)


def oom_kills(mount: Path = MOUNT, ours: Path = OURS) -> int | None:
    """Returns how many processes of this group were killed for lack of memory so far.

    None if the kernel does not count them.
    """
    for text in _read(mount, ours, "memory", ("memory.events", "memory.oom_control")):
        counts = dict(line.split() for line in text.splitlines())
        if "oom_kill" in counts:
            return int(counts["oom_kill"])
    return None


def _cpu_max(mount: Path, ours: Path) -> Iterator[tuple[str, str]]:
    """Yield quota and period of each group."""
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
