"""Environments of EnvPool: `envpool/LunarLander-v3`, stepped in C++. Extra [envpool].

EnvPool seeds its environments when it makes them, so a reset with a seed makes them anew. Ids,
options, rewards and observations are EnvPool's; some differ from gymnasium's of the same name.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.spaces import Box
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from penstock.configs.errors import UserError
from penstock.core.loading import check_options, explaining_errors, nearest

PREFIX = "envpool/"

_RESERVED = {
    "num_envs": "set actors.envs",
    "num_threads": "set actors.env_threads",
    "batch_size": "all environments of an actor are stepped together",
    "seed": "set run.seed",
}


class PoolVectorEnv(VectorEnv):
    """`num_envs` environments on `threads` threads of their own."""

    metadata = {"render_modes": [], "autoreset_mode": AutoresetMode.NEXT_STEP}  # noqa: RUF012

    def __init__(self, name: str, options: Mapping[str, Any], num_envs: int, threads: int) -> None:
        """Read the spaces of an environment. The first reset makes the environments.

        Args:
            name: EnvPool's own, without a prefix.
            options: of EnvPool (`env.kwargs`).
            num_envs: number of environments.
            threads: number of EnvPool's threads.

        Raises:
            UserError: for a name or an option that EnvPool does not have.
        """
        purpose = f"environment {PREFIX}{name}"
        with explaining_errors(purpose):
            self._envpool: Any = importlib.import_module("envpool")
        if name not in self._envpool.list_all_envs():
            raise UserError(
                f"{purpose}: EnvPool has no {name}; {nearest(name, self._envpool.list_all_envs())}"
            )

        with _quiet():
            spec = self._envpool.make_spec(name)
            self.single_observation_space = _unbounded(spec.observation_space)
            self.single_action_space = spec.action_space
        check_options(options, spec.config._asdict(), purpose, _RESERVED)

        self.num_envs = num_envs
        self._name = name
        self._options = {**options, "num_envs": num_envs, "num_threads": threads}
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        # EnvPool's environments, once a reset has made them.
        self._pool: Any = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin new episodes; a seed makes the environments anew, as EnvPool seeds them then."""
        if seed is not None or self._pool is None:
            self.close_extras()
            seed_option = {} if seed is None else {"seed": seed}
            make = partial(self._envpool.make, self._name, env_type="gymnasium")
            with _quiet():
                self._pool = make(**self._options, **seed_option)
                # EnvPool makes the spaces on first access, with warnings.
                _ = self._pool.action_space, self._pool.observation_space

        observations, _ = self._pool.reset()
        return observations, {}

    def step(self, actions: npt.NDArray[Any]) -> Any:
        if actions.dtype.kind == "i":
            actions = actions.astype(np.int32, copy=False)
        return (*self._pool.step(actions)[:4], {})

    def close_extras(self, **kwargs: Any) -> None:
        if self._pool is not None:
            self._pool.close()
            self._pool = None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress gymnasium's warnings about EnvPool's spaces."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _unbounded(space: Any) -> Any:
    """Returns the space without bounds, if it is a Box of floats.

    EnvPool often gives the least positive float where there is no bound.
    """
    if isinstance(space, Box) and space.dtype.kind == "f":
        return Box(-np.inf, np.inf, space.shape, space.dtype.type)
    return space
