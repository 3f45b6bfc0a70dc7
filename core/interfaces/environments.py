"""What an actor plays: environments that are stepped together, one for each row of a slot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.core.interfaces.inference import ReadPolicy
    from penstock.core.params import Array
    from penstock.envs.vector_env import EnvInfo

    Flags = npt.NDArray[np.bool_]


class Environments(Protocol):
    """Steps as many environments as a slot has columns, each row by row.

    Calls come from one thread: `reset_into` first, then `step_into`; `close` last. Between two
    unrolls come `refresh`, which must have returned True before the first step, and `forget`. When
    a step ends an episode, the observation that it writes is the final one, and a later step writes
    the first of the next episode: by default the next step, in which the row does not play
    (`penstock.envs.vector_env` has the invariants of a step).
    """

    info: EnvInfo
    count: int
    playing: Flags | None
    """The rows whose next step is a decision, by the last step or reset; bool ``[count]``.

    They are `alive` in the slot. The others have no reward, and forget their recurrent state. None:
    all but those whose episode has just ended.
    """
    recorded: Mapping[str, Array]
    """Values of the last step for the columns `info.recorded`, each ``[count]``.

    The arrays are the same all the time; each step writes into them.
    """
    life_lost: Flags | None
    """Which episodes ended in the last step with a life, while their game continues."""
    shortened: Flags | None
    """Which first episodes were truncated in the last step, before their time limit."""
    dropped: Flags | None
    """Which environments failed in the last step (`env.on_error`).

    The observation is the first of their next episode. Their rows are not `alive`, and have no
    reward and no flags.
    """

    def reset_into(self, seed: int, out: Array) -> None:
        """Begin new episodes everywhere, and write their first observations ``[count, *shape]``.

        All that is random from then on is given by the seed and the actions.
        """

    def step_into(self, actions: Array, out: Array) -> tuple[npt.NDArray[Any], Flags, Flags]:
        """Step every environment, and write the observations that follow.

        Returns: raw rewards, terminated and truncated, each ``[count]``. No row has both flags.
        """

    def refresh(self, read: ReadPolicy) -> bool:
        """Take the newest weights of opponents, where other policies play some seats.

        Returns: whether each opponent has some; True if there are no such opponents.
        """

    def forget(self) -> None:
        """Forget which weights of opponents were read: those of another learner may be older."""

    def watch_precision(self) -> None:
        """From now on, tell the user about observations that networks cannot use in full.

        They are numbers of the next observations that networks will not tell apart, and an action
        mask of the next reset that they do not see.
        """

    def state_dict(self) -> Any:
        """Returns the state between two steps, as plain data. Raises NotSavableError."""

    def load_state_dict(self, state: Any) -> None:
        """Continue from a `state_dict`. Raises NotSavableError if it does not fit."""

    def pictures(self) -> list[Array]:
        """Returns pictures of the last step, uint8 ``[H, W, 3]`` each, the oldest first."""

    def close(self) -> None:
        """Close the environments."""
