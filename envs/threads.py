"""Single environments stepped side by side by threads, for those that wait outside Python.

Each thread has a fixed share of the environments, and makes, resets, steps and closes them: their
resources may belong to its thread. The first share is the caller's own. In a step the threads make
each environment's next call ahead; then gymnasium's SyncVectorEnv goes through the environments as
always and finds the results. So order, resets and errors are its own, and results equal those of
one thread, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
from gymnasium.vector.utils import iterate

from penstock.envs.vector_env import SinglesVectorEnv, copy_observation

Single = gymnasium.Env[Any, Any]
Call = Callable[[], Any]


class ThreadedVectorEnv(SinglesVectorEnv):
    """Steps single environments on several threads, with autoreset NEXT_STEP.

    A checkpoint holds the attributes of this class and of `_Game` by their names, and the name of
    `_Game` itself (`penstock.envs.saved_state`).
    """

    envs: list[Any]
    """The environments, each a `_Game`."""

    def __init__(
        self,
        makes: Sequence[Callable[[], Single]],
        threads: int,
        *,
        beat: Callable[[], object] | None = None,
    ) -> None:
        """Make the environments, each on the thread that will step it.

        Args:
            makes: the constructor of each environment.
            threads: >= 1, including the caller's; not more are used than there are environments.
            beat: called after the reset of each environment.

        Raises:
            Exception: of a constructor.
        """
        # The first share of the environments is the caller's own, and has no worker.
        count = len(makes)
        threads = min(threads, count)
        bounds = [count * i // threads for i in range(threads + 1)]
        self._shares = [slice(bounds[i], bounds[i + 1]) for i in range(threads)]
        self._workers = [ThreadPoolExecutor(1, f"games-{i}") for i in range(1, threads)]
        owners: list[Executor | None] = [None] * count
        for share, worker in zip(self._shares[1:], self._workers, strict=True):
            owners[share] = [worker] * (share.stop - share.start)

        owned_makes = [
            partial(_Game, make, owner) for make, owner in zip(makes, owners, strict=True)
        ]
        try:
            super().__init__(owned_makes, beat=beat)
        except BaseException:
            # The first error is raised, and none of `close`.
            with suppress(Exception):
                self.close()
            raise

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Reset all environments; a `reset_mask` among the options is not supported."""
        seeds: list[int | None]
        if seed is None:
            seeds = [None] * self.num_envs
        elif isinstance(seed, int):
            seeds = [seed + i for i in range(self.num_envs)]
        else:
            seeds = seed

        self._play_ahead(
            [
                partial(game.env.reset, seed=env_seed, options=options)
                for game, env_seed in zip(self.envs, seeds, strict=True)
            ]
        )
        return super().reset(seed=seeds, options=options)

    def step(self, actions: Any) -> Any:
        env_actions = iterate(self.action_space, actions)
        calls: list[Call] = [
            game.env.reset if over else partial(game.env.step, action)
            for game, action, over in zip(self.envs, env_actions, self._autoreset_envs, strict=True)
        ]
        self._play_ahead(calls)
        return super().step(actions)

    def close_extras(self, **kwargs: Any) -> None:
        try:
            super().close_extras(**kwargs)
        finally:
            for worker in self._workers:
                worker.shutdown()

    def _play_ahead(self, calls: Sequence[Call]) -> None:
        """Make the next call of each environment, and return when all are made."""
        first_share, *other_shares = [
            (self.envs[share], calls[share], self.beat) for share in self._shares
        ]
        futures = [
            worker.submit(_play, *share)
            for worker, share in zip(self._workers, other_shares, strict=True)
        ]
        _play(*first_share)
        for future in futures:
            future.result()


class _Game(gymnasium.Wrapper[Any, Any, Any, Any]):
    """One environment, whose next call is made ahead of its request."""

    def __init__(self, make: Callable[[], Single], owner: Executor | None) -> None:
        """Make the environment on the thread of ``owner``, or on the caller's if it is None."""
        super().__init__(_by(owner, make))
        self._owner = owner
        self._result: Any = None
        self._error: BaseException | None = None

    def play(self, call: Call) -> bool:
        """Make a call, and hold its result or error for `reset` or `step`.

        Returns: whether the call succeeded.
        """
        try:
            observation, *outcome = call()
            # The next environment of this thread may write to the same memory.
            self._result = copy_observation(observation), *outcome
        except BaseException as error:
            self._error = error
        return self._error is None

    def reset(self, **kwargs: Any) -> Any:
        return self._outcome()

    def step(self, action: Any) -> Any:
        return self._outcome()

    def close(self) -> None:
        _by(self._owner, self.env.close)

    def _outcome(self) -> Any:
        """Returns the result of the call that was made ahead, or raises its error."""
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self._result


def _play(games: Iterable[_Game], calls: Iterable[Call], beat: Call | None) -> None:
    """Make the calls of one share of the environments, and report each as progress.

    After a failure the rest is skipped, as in a single thread.
    """
    for game, call in zip(games, calls, strict=True):
        if not game.play(call):
            return
        if beat is not None:
            beat()


def _by(owner: Executor | None, call: Call) -> Any:
    """Returns the result of ``call``, made by the thread of ``owner``, or by the caller's if it is
    None."""
    if owner is None:
        return call()

    try:
        future = owner.submit(call)
    except RuntimeError:
        # The interpreter ends, and its threads have ended.
        return call()
    return future.result()
