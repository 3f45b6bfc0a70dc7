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
from penstock.core.params import Float32
from penstock.models.acting.categorical import Explanation
from penstock.models.acting.critic import Critic, state_values
from penstock.models.acting.policy import Policy

FORMAT = "penstock decisions 1"
SUFFIX = ".json"
"""Is appended to the name of the video."""
MOST_STEPS = 3000
MOST_VALUES = 24
"""Choices, or numbers, of one decision that are stored."""
MOST_EPISODES = 100
NAME_LENGTH = 40
NBYTES = 4 << 20
"""A larger file is not read; what `DecisionTrack` writes is smaller."""
KINDS = ("probabilities", "q", "mean")
"""The kinds of "rows"."""
IMPOSSIBLE = -1e8
"""A Q-value below this stands for a forbidden action."""

Row = dict[str, Any]


class Decision(NamedTuple):
    """What was decided in one state."""

    action: list[float]
    rows: list[float | None]
    """What it was decided by, of one of `KINDS`."""
    std: list[float | None] | None
    """The standard deviations of numbers."""
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
        self._policy = policy
        self._critic = critic
        self._sample = sample

        self._decision: Decision | None = None  # of the step to come
        self._pictures = 0  # pictures of the video so far
        self._kind: str | None = None  # of `KINDS`
        self._value_count = 0  # values of a decision, those that are not stored included
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

        # The critic needs the recurrent state before the observation, which `explain` overwrites.
        previous_state = self._policy.state.copy()
        explanation = self._policy.explain(obs, sample=self._sample)
        values = state_values(self._critic, explanation, obs, previous_state)

        self._kind, rows = _shown(explanation, squashed=self._policy.decider.squashed)
        self._value_count = len(rows)
        std = explanation.std
        action = np.ravel(explanation.actions[0])
        self._decision = Decision(
            action=[_short(number) or 0.0 for number in action[:MOST_VALUES]],
            rows=[_short(number) for number in rows[:MOST_VALUES]],
            std=None if std is None else [_short(number) for number in std[0, :MOST_VALUES]],
            value=None if values is None else _short(values[0]),
        )
        return explanation.actions

    def on_step(self, pictures: int, reward: float, *, plays: bool) -> None:
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
            row = {
                "picture": self._pictures - 1,
                "action": decision.action,
                "reward": _short(reward),
                "value": decision.value,
                "rows": decision.rows,
                "std": decision.std,
            }
            for name, column in self._columns.items():
                column.append(row[name])
        self._pictures += pictures

    def write(self, path: Path, about: Mapping[str, Any], names: Sequence[str]) -> None:
        """Write the decisions as a JSON file.

        Args:
            path: of the file.
            about: further fields for it.
            names: names of the choices, or of the numbers of an action; may be empty.

        Raises:
            OSError: if it cannot be written.
        """
        fields = {
            "format": FORMAT,
            **about,
            "kind": self._kind,
            "names": list(names[: min(self._value_count, MOST_VALUES)]),
            "values": self._value_count,
            "steps": self.steps,
            **self._columns,
        }
        path.write_text(json.dumps(fields, separators=(",", ":")) + "\n")


def decisions_path(video: Path) -> Path:
    """Returns the path of the decisions of a video, beside it."""
    return video.with_name(video.name + SUFFIX)


def parse_decisions(text: str | None) -> Row | None:
    """Returns the decisions in the ``text`` of a file that may have been written by anyone.

    Lists are bounded, and columns are as long as each other; numbers are finite or None.

    Returns: the fields of the file, None if it has no decisions.
    """
    try:
        fields = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        return None

    pictures = [finite(each) for each in _as_list(fields.get("picture"))[:MOST_STEPS]]
    if any(each is None or each < 0 for each in pictures):
        return None

    steps = len(pictures)
    kind = fields.get("kind")
    names = _as_list(fields.get("names"))[:MOST_VALUES]
    counts = _as_list(fields.get("counts"))[:MOST_VALUES]
    episodes = _as_list(fields.get("episodes"))[:MOST_EPISODES]
    return {
        "kind": kind if kind in KINDS else None,
        "names": [str(name)[:NAME_LENGTH] for name in names],
        "counts": [finite(each) for each in counts],
        "fps": finite(fields.get("fps")),
        "sampled": fields.get("sampled") is True,
        "trained_steps": finite(fields.get("trained_steps")),
        "values": finite(fields.get("values")),
        "steps": finite(fields.get("steps")),
        "episodes": [_checked_episode(each) for each in episodes if isinstance(each, Mapping)],
        "picture": pictures,
        "reward": _number_column(fields.get("reward"), steps),
        "value": _number_column(fields.get("value"), steps),
        "action": _list_column(fields.get("action"), steps),
        "rows": _list_column(fields.get("rows"), steps),
        "std": _list_column(fields.get("std"), steps),
    }


def _shown(explanation: Explanation, *, squashed: bool) -> tuple[str | None, Float32]:
    """Returns the one of `KINDS` that the decision in one environment is of, and its numbers.

    Means are shown as actions, so after tanh where these are ``squashed``.
    """
    if explanation.probabilities is not None:
        return "probabilities", explanation.probabilities[0]
    if explanation.q is not None:
        return "q", explanation.q[0]
    if explanation.mean is not None:
        mean = explanation.mean[0]
        return "mean", np.tanh(mean) if squashed else mean
    return None, np.empty(0, np.float32)


def _checked_episode(fields: Mapping[str, Any]) -> Row:
    """Returns the fields of an episode, with None for a number that is none."""
    return {
        "return": finite(fields.get("return")),
        "length": finite(fields.get("length")),
        "cut": fields.get("cut") is True,
    }


def _as_list(value: Any) -> list[Any]:
    """Returns the ``value`` if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def _number_column(value: Any, steps: int) -> list[float | None]:
    """Returns a column of finite numbers or None, filled up with None to as many ``steps``."""
    column = [finite(each) for each in _as_list(value)[:steps]]
    return column + [None] * (steps - len(column))


def _list_column(value: Any, steps: int) -> list[list[float | None]]:
    """Returns a column of lists of numbers, filled up with empty ones to as many ``steps``."""
    column = [
        [finite(number) for number in _as_list(each)[:MOST_VALUES]]
        for each in _as_list(value)[:steps]
    ]
    return column + [[] for _ in range(steps - len(column))]


def _short(value: Any) -> float | None:
    """Returns a number rounded to four digits.

    None stands for what is not finite, and for the Q-value of a forbidden action.
    """
    if value is None or not np.isfinite(value) or value < IMPOSSIBLE:
        return None
    return float(f"{float(value):.4g}")
