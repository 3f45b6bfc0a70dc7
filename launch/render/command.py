"""The command that a script or manifest starts, checked where that is rendered."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.configs.load import Resolved, resolve_target

AUTO = "auto"
CORES = 16  # of a node whose cores are not known, for the checks of a config


class Command(NamedTuple):
    """Arguments of `penstock train` or `penstock learner`."""

    resolved: Resolved
    text: str
    """Target and overrides, quoted for a shell; without ``run.dir``, which the script adds."""


def command(
    target: str,
    overrides: Sequence[str],
    defaults: Mapping[str, str],
    nodes: int,
    learners: int | None = None,
) -> Command:
    """The arguments for a run on so many nodes.

    Args:
        target: as of `penstock train`.
        overrides: ``key=value``.
        defaults: options by name, unless ``overrides`` give them. ``actors.count`` may be "auto",
            which is not that of this machine.
        nodes: of the cluster.
        learners: their number where an option of the command sets it.

    Raises UserError where the target or an override is wrong.
    """
    given = {text.partition("=")[0].strip() for text in overrides}
    added = {name: value for name, value in defaults.items() if name not in given}
    checked = dict(added)
    if checked.get("actors.count") == AUTO:
        checked["actors.count"] = str(nodes * CORES)
    if learners is not None:
        checked["learner.count"] = str(learners)
    resolved = resolve_target(target, [*overrides, *_pairs(checked)])
    shown = [text for text in overrides if not text.startswith("run.dir=")]
    return Command(resolved, " ".join(map(shlex.quote, [target, *shown, *_pairs(added)])))


def _pairs(options: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]
