"""What a replay must give back, worked out from plain lists of everything that was ever added.

A `Player` plays made-up environments by hand and remembers each step as it was: whole observation
stacks before and after, rewards, flags. `expected` then follows the definitions step by step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
PADDINGS = ("repeat", "zeros", "odd")


@dataclass
class Step:
    """One decision of one environment. ``starts``: it does not continue the step before."""

    obs: dict[str, Array]
    next_obs: dict[str, Array]
    action: int
    reward: float
    terminated: bool
    truncated: bool
    starts: bool
    counts: bool = True


@dataclass
class Expected:
    obs: dict[str, Array]
    next_obs: dict[str, Array]
    reward: np.float32
    discount: np.float32
    terminated: bool
    truncated: bool


@dataclass
class History:
    """Steps of one environment of one stream, in their order."""

    steps: list[Step] = field(default_factory=list)

    def expected(self, index: int, n_step: int, discount: float) -> Expected:
        """What a sample of step ``index`` holds, as far as the stream goes."""
        first = last = self.steps[index]
        total, factor = 0.0, 1.0
        for offset in range(n_step):
            if index + offset == len(self.steps):
                break
            step = self.steps[index + offset]
            if offset and (step.starts or not step.counts):
                break
            total += factor * step.reward
            factor *= discount
            last = step
            if step.terminated or step.truncated:
                break
        return Expected(
            first.obs,
            last.next_obs,
            np.float32(total),
            np.float32(0 if last.terminated else factor),
            last.terminated,
            last.truncated and not last.terminated,
        )


@dataclass(frozen=True)
class Shape:
    """An observation leaf: ``stack`` frames of ``frame``, or one array of it when 0."""

    dtype: str
    frame: tuple[int, ...]
    stack: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.stack, *self.frame) if self.stack else self.frame


class Environment:
    """Random observations of few values, so that frames are equal by chance now and then."""

    def __init__(self, shapes: dict[str, Shape], rng: np.random.Generator) -> None:
        self._shapes, self._rng = shapes, rng
        self.obs: dict[str, Array] = {}

    def reset(self, padding: str) -> dict[str, Array]:
        obs = {}
        for name, shape in self._shapes.items():
            frame = self._frame(shape)
            if not shape.stack:
                obs[name] = frame
                continue
            older = {
                "repeat": [frame] * (shape.stack - 1),
                "zeros": [np.zeros_like(frame)] * (shape.stack - 1),
                "odd": [self._frame(shape) for _ in range(shape.stack - 1)],
            }[padding]
            obs[name] = np.stack([*older, frame])
        self.obs = obs
        return obs

    def step(self) -> dict[str, Array]:
        after = {}
        for name, shape in self._shapes.items():
            frame = self._frame(shape)
            old = self.obs[name]
            after[name] = np.concatenate([old[1:], frame[None]]) if shape.stack else frame
        self.obs = after
        return after

    def _frame(self, shape: Shape) -> Array:
        return self._rng.integers(0, 3, shape.frame).astype(shape.dtype)


class Player:
    """One stream: ``envs`` environments, stepped together, reset as ``autoreset`` says."""

    def __init__(
        self, shapes: dict[str, Shape], envs: int, autoreset: str, first_action: int, seed: int
    ) -> None:
        self._rng = np.random.default_rng(seed)
        self._autoreset = autoreset
        self._envs = [Environment(shapes, self._rng) for _ in range(envs)]
        self._over = [True] * envs  # to be reset before, or by, the next step
        self._began = [False] * envs
        self._action = first_action
        self.histories = [History() for _ in range(envs)]
        self.layout = "object"  # of final_obs

    def step(self, ends: list[str], paddings: list[str], silent: list[bool]) -> dict[str, Any]:
        """Arguments of `add` for one step. ``ends``: "", "terminated", "truncated", "both";
        ``silent``: reset without a word, which only "none" allows."""
        rows = [
            self._step_one(i, *what)
            for i, what in enumerate(zip(ends, paddings, silent, strict=True))
        ]
        info: dict[str, Any] = {}
        finals = [row.pop("final") for row in rows]
        if any(final is not None for final in finals):
            info = self._info(finals, rows)
        obs, after = ([row.pop(key) for row in rows] for key in ("obs", "next_obs"))
        batch: dict[str, Any] = {
            key: np.array([row[key] for row in rows])
            for key in ("action", "reward", "terminated", "truncated")
        }
        batch["reward"] = batch["reward"].astype(np.float32)
        return batch | {"obs": _together(obs), "next_obs": _together(after), "info": info}

    def _step_one(self, i: int, end: str, padding: str, silent: bool) -> dict[str, Any]:
        env, starts = self._envs[i], False
        self._action += 1
        row: dict[str, Any] = {
            "action": self._action,
            "reward": float(self._rng.integers(-3, 4)),
            "terminated": end in ("terminated", "both"),
            "truncated": end in ("truncated", "both"),
            "final": None,
        }
        resets = self._over[i] and self._began[i] and self._autoreset == "next_step"
        if resets:  # this step only resets
            row |= {"obs": env.obs, "next_obs": env.reset(padding), "reward": 0.0}
            row |= {"terminated": False, "truncated": False}
            self._over[i] = False
            self._remember(i, row, row["next_obs"], starts=False, counts=False)
            return row
        if not self._began[i] or (self._autoreset == "none" and (self._over[i] or silent)):
            env.reset(padding)
            starts = True
        self._began[i] = True
        row["obs"] = env.obs
        after = env.step()
        self._over[i] = bool(end)
        if end and self._autoreset == "same_step":
            row["final"], after = after, env.reset(padding)
        row["next_obs"] = after
        self._remember(i, row, after if row["final"] is None else row["final"], starts, True)
        return row

    def _remember(
        self, i: int, row: dict[str, Any], after: dict[str, Array], starts: bool, counts: bool
    ) -> None:
        step = Step(
            row["obs"],
            after,
            row["action"],
            row["reward"],
            row["terminated"],
            row["truncated"],
            starts,
            counts,
        )
        self.histories[i].steps.append(step)

    def _info(self, finals: list[dict[str, Array] | None], rows: list[Any]) -> dict[str, Any]:
        """As gymnasium gives it, or as ale-py does: dense, with no mask."""
        if self.layout == "dense":
            known = [
                f if f is not None else r["next_obs"] for f, r in zip(finals, rows, strict=True)
            ]
            return {"final_obs": _together(known)}
        array = np.full(len(finals), None, dtype=object)
        for i, final in enumerate(finals):
            if final is not None:
                array[i] = final.get("", final)
        return {"final_obs": array, "_final_obs": np.array([f is not None for f in finals])}


def _together(parts: list[dict[str, Array]]) -> Any:
    """[E, ...] of each leaf; the leaf named "" is the observation itself."""
    joined = {name: np.stack([part[name] for part in parts]) for name in parts[0]}
    return joined.get("", joined)
