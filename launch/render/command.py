"""The command that a script or manifest starts, checked where that is rendered."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.autotune import connectors, envs
from penstock.configs.errors import UserError
from penstock.configs.load import Resolved, resolve_target

AUTO = "auto"


class Command(NamedTuple):
    """Arguments of `penstock train` or `penstock learner`."""

    resolved: Resolved
    text: str
    """Target and overrides, quoted for a shell; without ``run.dir``, which the script adds."""


def command(
    target: str,
    overrides: Sequence[str],
    defaults: Mapping[str, str],
    learners: int | None = None,
    one_learner: str = "",
) -> Command:
    """The arguments for a run on a cluster.

    Args:
        target: as of `penstock train`.
        overrides: ``key=value``.
        defaults: options by name, unless ``overrides`` give them. ``actors.count`` may be `AUTO`,
            as the cores of the cluster are known to the run only.
        learners: their number where they are started one by one, as an option of the command says.
        one_learner: that option with which there is one.

    Raises UserError where the target or an override is wrong.
    """
    given = {text.partition("=")[0].strip() for text in overrides}
    added = {name: value for name, value in defaults.items() if name not in given}
    checked = dict(added)
    if learners is not None:
        checked["learner.count"] = str(learners)
    resolved = resolve_target(target, [*overrides, *_pairs(checked)])
    if learners is not None and learners > 1:
        config = resolved.config
        envs.check_not_auto(config, f"learners on {learners} hosts")
        connectors.check_not_auto(config, f"{learners} learners need the same number")
        pace = config.learner.pace
        if config.learner.served:
            raise UserError(
                f"learner.pace {pace} needs a parameter server, which --engine none does not "
                f"start; set --engine ray, {one_learner} or learner.pace=bsp, or start the "
                "learners by hand (docs/many-machines.md)"
            )
    shown = [text for text in overrides if not text.startswith("run.dir=")]
    return Command(resolved, " ".join(map(shlex.quote, [target, *shown, *_pairs(added)])))


def _pairs(options: Mapping[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in options.items()]
