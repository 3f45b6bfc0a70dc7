"""From an `env` section to a vector of environments, the fastest way there is.

An environment id is one of
    CartPole-v1               registered with gymnasium
    module:EnvId-v0           registered by importing that module
    module:function           called with env.kwargs, returns a gymnasium.Env, or a
                              gymnasium.vector.VectorEnv of `num_envs` if it takes that

Its own vector form is used where it has one, else gymnasium's synchronous vector environment, or
several threads that step its environments side by side. Wrappers apply to single environments, so
they turn the own form off.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from copy import deepcopy
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import count as counted_from
from itertools import islice
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import gymnasium
from gymnasium.envs.registration import EnvSpec
from gymnasium.spaces import MultiDiscrete
from gymnasium.vector import AutoresetMode, VectorEnv

from penstock.configs.errors import UserError
from penstock.core.loading import (
    callables,
    check_keywords,
    explained,
    import_module,
    load,
    nearest,
    parameters,
    shadowed_file,
)
from penstock.envs import atari, envpool, rendering
from penstock.envs.failed_episodes import DropFailedEpisodes
from penstock.envs.first_episodes import staggered
from penstock.envs.instances import claim, refuse_statistics
from penstock.envs.lives import LivesAsEpisodes
from penstock.envs.process_state import users_side
from penstock.envs.single import SingleEnv
from penstock.envs.threads import ThreadedVectorEnv
from penstock.envs.vector_env import BatchedEnv, EnvInfo, SinglesVectorEnv, copied

if TYPE_CHECKING:
    from penstock.configs.sections import EnvConfig
from penstock.configs.secrets import resolve

_RESERVED = {
    "num_envs": "set actors.envs",
    "vectorization_mode": "the fastest is taken",
    "vector_kwargs": "give the vector environment's options in env.kwargs",
    "wrappers": "set env.wrappers",
}
KEEP_OBSERVATIONS = (gymnasium.wrappers.FrameStackObservation, gymnasium.wrappers.DelayObservation)
# options of gymnasium.make itself
_GYMNASIUM_OPTIONS = ("max_episode_steps", "disable_env_checker")


class FirstIndex(IntEnum):
    """The `index` of the first environment of a process that is no actor.

    A function with a parameter `index` gets the number of the environment there, such as for a port
    of its own. Actors count theirs from 0 (`first_index`).
    """

    COMMAND = 10_000
    """Of `penstock eval`, and of what else plays a stored policy."""
    LEARNER = 11_000
    """To look at the spaces; of learner 0."""
    MEASURED = 12_000
    """To time them before a run."""
    EVALUATOR = 15_000
    VIDEO = 17_000
    CHECK = 18_000
    """Of `penstock check-env`, one by one."""
    RATED = 19_000
    """Of its vector, as what it has closed may hold its ports for a while."""


AFTER_OTHERS = 20_000


def first_index(actor: int, envs: int) -> int:
    """Returns the `index` of the first of an actor's ``envs`` environments.

    Environments are counted through all actors, without the numbers of `FirstIndex`.
    """
    first = actor * envs
    return first if first + envs <= FirstIndex.COMMAND else first + envs + AFTER_OTHERS


@dataclass(frozen=True)
class _Source:
    """The ways in which an environment can be made."""

    single: Callable[..., gymnasium.Env[Any, Any]] | None = None
    vector: Callable[..., VectorEnv] | None = None
    takes_index: bool = False
    """Whether both take the keyword `index`."""
    vector_name: str = ""
    has_threads: bool = False  # whether its own vector form has threads
    frames_per_step: int = 1

    def numbered(self, index: int) -> dict[str, int]:
        """The keywords of an environment, or of a vector that begins with it."""
        return {"index": index} if self.takes_index else {}


class Adapter(NamedTuple):
    """Another library, whose environments have ids of their own behind a prefix."""

    library: str
    make: Callable[[str, Mapping[str, Any], int, int], VectorEnv]
    """(id without the prefix, env.kwargs, number of environments, threads) -> all of them."""
    has_threads: bool
    """Whether they are stepped by those threads."""


ADAPTERS: dict[str, Adapter] = {
    envpool.PREFIX: Adapter("EnvPool", envpool.PoolVectorEnv, has_threads=True)
}
"""By the prefix of their ids."""


class Makers(NamedTuple):
    """Constructors of an environment: a single one, and its own vector form."""

    single: Callable[[], gymnasium.Env[Any, Any]] | None
    vector: Callable[[int], VectorEnv] | None
    takes_index: bool = False
    """Whether each environment gets a number of its own, by which it may differ from others."""


def make(
    env: EnvConfig,
    count: int,
    threads: int = 1,
    *,
    filmed: bool = False,
    first: int = FirstIndex.COMMAND,
    stagger: bool = False,
    beat: Callable[[], object] | None = None,
) -> BatchedEnv:
    """Make `count` environments, in the fastest way that the config allows.

    Args:
        env: the config's section.
        count: number of environments.
        threads: of the environment's own vector form if it has any; else threads that step single
            environments side by side.
        filmed: request that one environment renders itself (`BatchedEnv.pictures`), if it can.
        first: the `index` of the first environment, for a function that takes one (`FirstIndex`).
        stagger: for training. First episodes of single environments with a time limit then have
            different lengths (penstock.envs.first_episodes).
        beat: called after the constructor and after each reset of every single environment. These
            may take long, and each is progress.

    Raises:
        UserError: a sentence with the next step, for a mistake in `env` or if the environment
            cannot be constructed.
    """
    purpose = f"environment {env.id}"
    env = resolve(env)
    with explained(purpose), users_side():
        source = _find(env, threads, filmed)
        frames_per_step = source.frames_per_step
        drops = env.on_error == "drop_episode"
        if source.vector and not env.wrappers and not drops:
            vector = _own_vector(source.vector, purpose, count, **source.numbered(first))
            how = f"{env.id} is stepped by {source.vector_name}"
            if threads > 1 and not source.has_threads:
                how += f", and actors.env_threads={threads} does nothing for it"
        elif source.single:
            single = partial(_wrapped, source.single, env, purpose)
            each: list[Callable[[], gymnasium.Env[Any, Any]]] = [
                partial(single, **source.numbered(first + i)) for i in range(count)
            ]
            if stagger:
                each = staggered(each, first)
            if drops:
                each = [partial(_dropping, make_one, env.id) for make_one in each]
            if beat is not None:
                each = [partial(_made, make_one, beat) for make_one in each]
            vector, how = _singles(each, threads)
            if beat is not None:
                vector.beat = beat
            skipped = getattr(vector.envs[0].unwrapped, "frame_skip", None)
            frames_per_step = skipped if isinstance(skipped, int) else frames_per_step
            how = f"{env.id} is stepped {how}"
            if source.vector:
                cause = "env.wrappers turn" if env.wrappers else "env.on_error=drop_episode turns"
                how += f": {cause} {source.vector_name} off, which is faster"
        elif drops:
            raise UserError(
                f"{purpose} comes as a vector environment only, and env.on_error=drop_episode "
                "resets single ones; reset a row that fails where it is stepped, and set "
                "env.on_error=fail"
            )
        else:
            raise UserError(
                f"{purpose} comes as a vector environment only, and env.wrappers go around single "
                "ones; wrap it where it is made, and leave env.wrappers empty"
            )
        if not isinstance(vector, VectorEnv) or vector.num_envs != count:
            raise UserError(f"{purpose} must return a VectorEnv of num_envs={count}, not {vector}")
        claim(purpose, vector)
        return BatchedEnv(env.id, vector, frames_per_step, how, env.record)


def _singles(
    each: Sequence[Callable[[], gymnasium.Env[Any, Any]]], threads: int
) -> tuple[SinglesVectorEnv, str]:
    """A vector of single environments, and a sentence on how it steps them."""
    if threads > 1:
        how = f"side by side, by up to {threads} threads"
        return ThreadedVectorEnv(each, threads), how
    vector = SinglesVectorEnv(each, copy=False, autoreset_mode=AutoresetMode.NEXT_STEP)
    return vector, "one by one, by gymnasium's SyncVectorEnv"


def makers(env: EnvConfig) -> Makers:
    """Returns the constructors that `make` would use, for `penstock check-env`.

    Each call of a constructor gives the environments new numbers, from `FirstIndex.CHECK` on. The
    constructors raise UserError on failure.

    Raises:
        UserError: if there is no such environment.
    """
    purpose = f"environment {env.id}"
    env = resolve(env)
    with explained(purpose):
        source, numbers = _find(env, 1, False), counted_from(FirstIndex.CHECK)

        def single() -> gymnasium.Env[Any, Any]:
            assert source.single is not None
            return _wrapped(source.single, env, purpose, **source.numbered(next(numbers)))

        def vector(size: int) -> VectorEnv:
            assert source.vector is not None
            first, *_ = islice(numbers, size)
            return _own_vector(source.vector, purpose, size, **source.numbered(first))

        told = explained(purpose)
        return Makers(
            told(single) if source.single else None,
            told(vector) if source.vector and not env.wrappers else None,
            source.takes_index,
        )


def uses_threads(env: EnvConfig) -> bool:
    """Returns whether `actors.env_threads` step the environments of `env`.

    Raises:
        UserError: as `make`.
    """
    with explained(f"environment {env.id}"), users_side():
        source = _find(resolve(env), 1, False)
    are_single = bool(env.wrappers) or env.on_error == "drop_episode"
    return source.has_threads or source.vector is None or are_single


def probe(env: EnvConfig, threads: int = 1, first: int = FirstIndex.LEARNER) -> EnvInfo:
    """Returns the properties of the environments of `env`: makes one, and closes it.

    Arguments as of `make`.

    Raises:
        UserError: as `make`.
    """
    game = make(env, 1, threads, first=first)
    game.close()
    return game.info


def _find(env: EnvConfig, threads: int, filmed: bool) -> _Source:
    purpose = f"environment {env.id}"
    module_name, _, name = env.id.rpartition(":")
    module = import_module(module_name, purpose) if module_name else None
    function = getattr(module, name, None)
    if callable(function):
        return _from_function(function, env, filmed)
    for prefix, adapter in ADAPTERS.items():
        if name.startswith(prefix):
            return _from_adapter(adapter, name.removeprefix(prefix), env, threads)
    if name not in gymnasium.registry:
        with nullcontext() if name.startswith(atari.PREFIX) else suppress(UserError):
            atari.register(purpose)
    spec = gymnasium.registry.get(name)
    atari.refuse_raw(name, spec, env)
    if spec is None:
        raise _unknown(name, module, purpose)
    if name.startswith(atari.PREFIX):
        return _from_atari(spec, env, threads, filmed)
    return _from_spec(spec, env, filmed)


def _from_function(function: Callable[..., Any], env: EnvConfig, filmed: bool) -> _Source:
    check_keywords(function, env.kwargs, f"environment {env.id}", reserved=_RESERVED)
    kwargs = _next_step(function, env.kwargs)
    plain = kwargs
    takes_index = "index" in parameters(function) and "index" not in kwargs
    if filmed and "render_mode" in parameters(function):
        kwargs = {**kwargs, "render_mode": rendering.RENDER_MODE}
    if "num_envs" in parameters(function):
        return _Source(
            vector=lambda count, **own: function(num_envs=count, **own, **deepcopy(kwargs)),
            takes_index=takes_index,
            vector_name="its own vector form",
        )

    def single(**own: int) -> Any:
        if kwargs is plain:
            return function(**own, **deepcopy(kwargs))
        return _shown_or_plain(partial(function, **own), kwargs, plain)

    return _Source(single=single, takes_index=takes_index)


def _shown_or_plain(
    function: Callable[..., Any], kwargs: Mapping[str, Any], plain: Mapping[str, Any]
) -> Any:
    """The environment of a function that was asked to render.

    Where it renders nothing, the environment without that request; also where it refuses, if the
    error says that it cannot render.
    """
    try:
        made = function(**deepcopy(kwargs))
    except (TypeError, ValueError, AssertionError):
        made = function(**deepcopy(plain))
        if not rendering.draws_otherwise(made):
            raise
        return made
    if not rendering.draws_otherwise(made):
        return made
    made.close()
    return function(**plain)


def _from_atari(spec: EnvSpec, env: EnvConfig, threads: int, filmed: bool) -> _Source:
    options = atari.options(env.id, spec.kwargs, env.kwargs)
    if env.wrappers and options["episodic_life"]:
        raise UserError(
            f"environment {env.id}: episodic_life is not possible with env.wrappers, which wrap a "
            "single game; set env.kwargs.episodic_life=false, or leave env.wrappers empty"
        )

    def vector(count: int, threads: int = threads) -> VectorEnv:
        games = atari.make_vector(options, count, threads)
        made = rendering.FilmedAtari(games, options) if filmed else games
        return LivesAsEpisodes(made, options) if options["episodic_life"] else made

    return _Source(
        single=lambda: SingleEnv(vector(1, 1)),
        vector=vector,
        vector_name="ale_py.AtariVectorEnv",
        has_threads=True,
        frames_per_step=options["frameskip"],
    )


def _from_adapter(adapter: Adapter, name: str, env: EnvConfig, threads: int) -> _Source:
    """The source of another library's environment, called ``name`` there."""
    return _Source(
        vector=lambda count: adapter.make(name, env.kwargs, count, threads),
        vector_name=adapter.library,
        has_threads=adapter.has_threads,
    )


def _from_spec(spec: EnvSpec, env: EnvConfig, filmed: bool) -> _Source:
    own_form = spec.vector_entry_point and not spec.additional_wrappers
    single = partial(_registered_single, spec, env)
    if filmed:
        own_form, env = _drawing(spec, env, bool(own_form))
        single = partial(_filmed_single, partial(_registered_single, spec, env), single)
    return _Source(
        single=single if spec.entry_point else None,
        vector=partial(_registered_vector, spec, env) if own_form else None,
        vector_name="its own vector form",
    )


def _drawing(spec: EnvSpec, env: EnvConfig, own_form: bool) -> tuple[bool, EnvConfig]:
    """Choose the form of an environment that may render itself.

    Args:
        spec: the environment's registration.
        env: the config's section.
        has_vector: whether the environment has a vector form, which comes first.

    Returns:
        Whether to use the vector form, and the section with the request to render. If no form may
        render, ``has_vector`` and ``env`` as they are.
    """
    purpose = f"environment {env.id}"
    for entry_point, is_vector in ((spec.vector_entry_point, True), (spec.entry_point, False)):
        if entry_point is None or (is_vector and (not own_form or env.wrappers)):
            continue
        creator = load(entry_point, purpose) if isinstance(entry_point, str) else entry_point
        if rendering.draws(creator) or (not is_vector and _may_draw(creator)):
            kwargs = {"render_mode": rendering.RENDER_MODE, **env.kwargs}
            return is_vector, env.model_copy(update={"kwargs": kwargs})
    return own_form, env


def _may_draw(creator: Callable[..., Any]) -> bool:
    """Returns whether a function takes `render_mode`; it has no metadata that would show it."""
    known = parameters(creator)
    passes_on = any(p.kind is p.VAR_KEYWORD for p in known.values())
    return not isinstance(creator, type) and (passes_on or "render_mode" in known)


def _filmed_single(
    drawing: Callable[[], gymnasium.Env[Any, Any]], plain: Callable[[], gymnasium.Env[Any, Any]]
) -> gymnasium.Env[Any, Any]:
    """Make the environment that is asked to render, or the plain one if it refuses or cannot."""
    with suppress(TypeError, ValueError, AssertionError):
        made = drawing()
        if rendering.draws(made):
            return made
        made.close()
    return plain()


def _registered_single(spec: EnvSpec, env: EnvConfig) -> gymnasium.Env[Any, Any]:
    _creator(spec.entry_point, env, _GYMNASIUM_OPTIONS)
    kwargs: dict[str, Any] = deepcopy(env.kwargs)
    return gymnasium.make(spec, **kwargs)


def _registered_vector(spec: EnvSpec, env: EnvConfig, count: int) -> VectorEnv:
    creator = _creator(spec.vector_entry_point, env, _GYMNASIUM_OPTIONS[:1])
    kwargs = _next_step(creator, deepcopy(env.kwargs))
    vector = gymnasium.make_vec(spec, count, "vector_entry_point", **kwargs)
    if type(vector.action_space) is MultiDiscrete:
        vector.action_space = _Unchecked(vector.action_space)
    return vector


class _Unchecked(MultiDiscrete):
    """Accepts every action.

    Policies choose only valid ones, and the check costs a fifth of CartPole.
    """

    def __init__(self, space: MultiDiscrete) -> None:
        super().__init__(space.nvec, dtype=space.dtype.type, start=space.start)

    def contains(self, x: Any) -> bool:
        return True


def _unknown(name: str, module: ModuleType | None, purpose: str) -> UserError:
    """Returns the error for an id that names no environment, with what it may have meant."""
    if module is None:
        return UserError(f"{purpose} is not registered; {nearest(name, gymnasium.registry)}")

    hint = shadowed_file(module) or nearest(name, {*callables(module), *gymnasium.registry})
    return UserError(
        f"{purpose}: module {module.__name__} has no function {name} and registers no environment "
        f"{name}; {hint}"
    )


def _creator(
    entry_point: str | Callable[..., Any] | None, env: EnvConfig, more: Collection[str]
) -> Callable[..., Any]:
    """Returns the object that an entry point names, once it is known to take env.kwargs.

    Args:
        entry_point: the object, or "module:name".
        env: the config's section.
        own_options: further options, which gymnasium takes itself.

    Raises:
        UserError: for an option that neither takes.
    """
    purpose = f"environment {env.id}"
    creator = load(entry_point, purpose) if isinstance(entry_point, str) else entry_point
    assert creator is not None
    check_keywords(creator, env.kwargs, purpose, more=more, reserved=_RESERVED)
    return creator


def _next_step(creator: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """`kwargs`, with the canonical autoreset mode where a vector environment allows a choice."""
    if "autoreset_mode" in parameters(creator):
        return {"autoreset_mode": AutoresetMode.NEXT_STEP, **kwargs}
    return dict(kwargs)


def _wrapped(
    single: Callable[..., gymnasium.Env[Any, Any]], env: EnvConfig, purpose: str, **numbered: int
) -> gymnasium.Env[Any, Any]:
    made = single(**numbered)
    if not isinstance(made, gymnasium.Env):
        raise UserError(
            f"{purpose} must return a gymnasium.Env, not {type(made).__name__}; to return a vector "
            "environment, let its function take num_envs"
        )
    if made.metadata is None:  # gymnasium reads it
        made.unwrapped.metadata = {}
    for entry in env.wrappers:
        path, kwargs = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        name = f"wrapper {path}"
        with explained(name, "env.wrappers"):
            wrapper = load(path, name)
            check_keywords(wrapper, kwargs, name, reserved={"env": "the environment is given"})
            keeps = isinstance(wrapper, type) and issubclass(wrapper, KEEP_OBSERVATIONS)
            made = wrapper(_Copied(made) if keeps else made, **deepcopy(kwargs))
    refuse_statistics(purpose, made)
    return made


def _dropping(make_one: Callable[[], gymnasium.Env[Any, Any]], name: str) -> DropFailedEpisodes:
    return DropFailedEpisodes(make_one(), name)


def _made(
    make_one: Callable[[], gymnasium.Env[Any, Any]], beat: Callable[[], object]
) -> gymnasium.Env[Any, Any]:
    made = make_one()
    beat()
    return made


class _Copied(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives copies of observations to a wrapper that holds them.

    An environment may write to the same array in every step.
    """

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return copied(observation), info

    def step(self, action: Any) -> Any:
        observation, *outcome = self.env.step(action)
        return copied(observation), *outcome


def _own_vector(
    vector: Callable[..., VectorEnv], purpose: str, count: int, **numbered: int
) -> VectorEnv:
    env = vector(count, **numbered)
    if isinstance(env, VectorEnv):
        refuse_statistics(purpose, env)
    return env
