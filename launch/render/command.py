"""The command that a script or manifest starts, checked where that is rendered."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from penstock.autotune import connectors, envs
from penstock.configs.errors import UserError
from penstock.configs.load import Resolved, resolve_target

AUTO = "auto"
"""The value of an option that the run chooses."""


class Command(NamedTuple):
    """Arguments of `penstock train` or `penstock learner`."""

    resolved: Resolved
    text: str
    """Target and overrides, quoted for a shell; without ``run.dir``, which the script adds."""


def make_command(
    target: str,
    overrides: Sequence[str],
    defaults: Mapping[str, str],
    *,
    learners: int | None = None,
    one_learner: str = "",
) -> Command:
    """Make the arguments for a run on a cluster, and check them as the run would.

    Args:
        target: target as of `penstock train`.
        overrides: options of the user, each ``key=value``.
        defaults: values by the names of options that the user may leave out. ``actors.count`` may
            be `AUTO`, as the cores of the cluster are known to the run only.
        learners: number of learners if each is started by a command of its own; None if the run
            starts them.
        one_learner: the option of the rendering command that asks for one learner, for messages.

    Returns: the resolved target, and the arguments for the command.

    Raises:
        UserError: the target or an override is wrong, or does not go with several learners.
    """
    overridden = {override.partition("=")[0].strip() for override in overrides}
    added = {name: value for name, value in defaults.items() if name not in overridden}

    # The commands of single learners say their number by an option of their own.
    implied = dict(added)
    if learners is not None:
        implied["learner.count"] = str(learners)
    resolved = resolve_target(target, [*overrides, *_as_overrides(implied)])

    # Learners that start one by one cannot agree on what a run would measure or start for them.
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

    # The script adds the run's folder.
    kept_overrides = [text for text in overrides if not text.startswith("run.dir=")]
    arguments = [target, *kept_overrides, *_as_overrides(added)]
    return Command(resolved, shlex.join(arguments))


def _as_overrides(options: Mapping[str, str]) -> list[str]:
    """Returns options as overrides, each ``key=value``."""
    return [f"{name}={value}" for name, value in options.items()]
