"""What a policy decided in each step of a video, in a JSON file beside it: `agent.mp4.json`.

A decision belongs to the picture that shows the state it was taken in. The columns of the file have
a value for each step: "picture" (the number of that picture in the video), "action", "reward" (what
the step paid, raw), "value" (the network's estimate of the discounted return, in the units that it
is trained with), and "rows": the probabilities or the Q-values of the choices, or the means of
numbers with their "std".

The file is bounded: of a longer video it has the first `MOST_STEPS`, and of a larger action space
the first `MOST_VALUES`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.core.formatting import finite
from penstock.models.acting.critic import Critic
from penstock.models.acting.policy import Policy

FORMAT = "penstock decisions 1"
SUFFIX = ".json"  # after the name of the video
MOST_STEPS = 3000
MOST_VALUES = 24  # of one decision
MOST_EPISODES = 100
NAME_LENGTH = 40
NBYTES = 4 << 20  # a larger file is not read; what `DecisionTrack` writes is smaller
KINDS = ("probabilities", "q", "mean")
IMPOSSIBLE = -1e8  # a Q-value below stands for a forbidden action

Row = dict[str, Any]


class Decision(NamedTuple):
    """What was decided in one state."""

    action: list[float]
    basis: dict[str, list[float | None]]
    """The arrays of `ActionSampler.basis`, of which it was decided."""
    value: float | None
    """The value of the state; None if the network does not estimate it."""


class DecisionTrack:
    """Chooses actions as a policy over one environment does, and keeps what it decided by.

    `choose` and `on_step` are called in turn: a decision is kept when the environment has taken it.
    """

    def __init__(self, policy: Policy, critic: Critic | None, sample: bool) -> None:
        """Create an empty track.

        Args:
            policy: chooses the actions, over one environment.
            critic: values the states; None if the network has no value head.
            sample: whether actions are sampled.
        """
        self._policy, self._critic, self._sample = policy, critic, sample
        self._decision: Decision | None = None
        self._pictures = 0
        self._kind: str | None = None
        self._values = 0  # of a decision, also those that are left out
        self.steps = 0
        """Steps that were played, also those that are not kept."""
        self._columns: dict[str, list[Any]] = {
            name: [] for name in ("picture", "action", "reward", "value", "rows", "std")
        }

    def choose(self, obs: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Returns the action for observations ``[1, *shape]``, as `Policy.act` or `greedy` does."""
        if self.steps >= MOST_STEPS:
            # The file is full, so no further decisions are kept.
            return self._policy.act(obs) if self._sample else self._policy.greedy(obs)
        before = self._policy.state.copy()
        self._policy.outputs(obs)
        decider = self._policy.decider
        basis = {name: array[:, 0] for name, array in decider.basis().items()}

        value = None
        if self._critic is not None:
            value = float(self._critic(obs, before)[0])
        elif "q" in basis:
            value = float(basis["q"].max())

        action = decider.sample() if self._sample else decider.greedy()
        self._kind = next((kind for kind in KINDS if kind in basis), None)
        self._values = len(basis[self._kind]) if self._kind else 0
        self._decision = Decision(
            [_short(x) or 0.0 for x in np.ravel(action[0])[:MOST_VALUES]],
            {name: [_short(x) for x in array[:MOST_VALUES]] for name, array in basis.items()},
            _short(value),
        )
        return action

    def saw(self, pictures: int, reward: float, *, plays: bool) -> None:
        """The environment has made a step, which so many ``pictures`` show.

        Args:
            pictures: how many the video gets from it.
            reward: what the step paid, raw.
            plays: whether the environment took the last decision. It took none before the first
                pictures, nor before those of a reset.
        """
        decision, self._decision = self._decision, None
        if plays:
            self.steps += 1

        if plays and decision is not None:
            row = (
                self._pictures - 1,
                decision.action,
                _short(reward),
                decision.value,
                decision.basis.get(self._kind or "", []),
                decision.basis.get("std"),
            )
            for column, value in zip(self._columns.values(), row, strict=True):
                column.append(value)
        self._pictures += pictures

    def write(self, path: Path, about: Mapping[str, Any], names: Sequence[str]) -> None:
        """Write the decisions as a JSON file.

        Args:
            path: of the file.
            about: further fields for it.
            names: those of the choices, or of the numbers of an action; may be empty.

        Raises:
            OSError: if it cannot be written.
        """
        found = {
            "format": FORMAT,
            **about,
            "kind": self._kind,
            "names": list(names[: min(self._values, MOST_VALUES)]),
            "values": self._values,
            "steps": self.steps,
            **self._columns,
        }
        path.write_text(json.dumps(found, separators=(",", ":")) + "\n")


def beside(video: Path) -> Path:
    """Returns the path of the decisions of a video, beside it."""
    return video.with_name(video.name + SUFFIX)


def checked(text: str | None) -> Row | None:
    """Returns the decisions in the ``text`` of a file that may have been written by anyone.

    Lists are bounded, and columns are as long as each other; numbers are finite or None.

    Returns: the fields of the file, None if it has no decisions.
    """
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        return None
    pictures = [finite(each) for each in _list(found.get("picture"))[:MOST_STEPS]]
    if any(each is None or each < 0 for each in pictures):
        return None

    steps = len(pictures)
    kind, episodes = found.get("kind"), _list(found.get("episodes"))[:MOST_EPISODES]
    columns = {name: _numbers(found.get(name), steps) for name in ("reward", "value")}
    rows = {name: _rows(found.get(name), steps) for name in ("action", "rows", "std")}
    return {
        "kind": kind if kind in KINDS else None,
        "names": [str(name)[:NAME_LENGTH] for name in _list(found.get("names"))[:MOST_VALUES]],
        "counts": [finite(each) for each in _list(found.get("counts"))[:MOST_VALUES]],
        "fps": finite(found.get("fps")),
        "sampled": found.get("sampled") is True,
        "trained_steps": finite(found.get("trained_steps")),
        "values": finite(found.get("values")),
        "steps": finite(found.get("steps")),
        "episodes": [
            {
                "return": finite(each.get("return")),
                "length": finite(each.get("length")),
                "cut": each.get("cut") is True,
            }
            for each in episodes
            if isinstance(each, Mapping)
        ],
        "picture": pictures,
        **columns,
        **rows,
    }


def _list(found: Any) -> list[Any]:
    """Returns the ``value`` if it is a list, else an empty one."""
    return found if isinstance(found, list) else []


def _numbers(found: Any, steps: int) -> list[float | None]:
    """Returns a column of finite numbers or None, filled up with None to as many ``steps``."""
    given = [finite(each) for each in _list(found)[:steps]]
    return given + [None] * (steps - len(given))


def _rows(found: Any, steps: int) -> list[list[float | None]]:
    """Returns a column of lists of numbers, filled up with empty ones to as many ``steps``."""
    given = [[finite(x) for x in _list(each)[:MOST_VALUES]] for each in _list(found)[:steps]]
    return given + [[] for _ in range(steps - len(given))]


def _short(value: Any) -> float | None:
    """Returns a number rounded to four digits.

    None stands for what is not finite, and for the Q-value of a forbidden action.
    """
    if value is None or not np.isfinite(value) or value < IMPOSSIBLE:
        return None
    return float(f"{float(value):.4g}")
