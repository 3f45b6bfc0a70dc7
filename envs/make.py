"""From an `env` section to a vector of environments, the fastest way there is.

An environment id is one of
    CartPole-v1               registered with gymnasium
    module:EnvId-v0           registered by importing that module
    module:function           called with env.kwargs, returns a gymnasium.Env, or a
                              gymnasium.vector.VectorEnv of `num_envs` if it takes that, or of
                              `num_games`, whose rows are seats (penstock.envs.seats)
    envpool/…, pettingzoo/…   of another library (`ADAPTERS`)

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
from penstock.configs.games import GAMES_ID
from penstock.core.loading import (
    callables,
    check_keywords,
    explaining_errors,
    import_module,
    load,
    nearest,
    parameters,
    shadowed_file,
)
from penstock.envs import atari, envpool, pettingzoo, rendering
from penstock.envs.failed_episodes import DropFailedEpisodes
from penstock.envs.first_episodes import staggered
from penstock.envs.instances import claim, refuse_statistics
from penstock.envs.lives import LivesAsEpisodes
from penstock.envs.process_state import users_side
from penstock.envs.seats import SEATS, check_rows, seating_of
from penstock.envs.self_driven import games_info, refuse_to_make
from penstock.envs.single import SingleEnv
from penstock.envs.threads import ThreadedVectorEnv
from penstock.envs.vector_env import BatchedEnv, EnvInfo, SinglesVectorEnv, copy_observation

if TYPE_CHECKING:
    from penstock.configs.sections import EnvConfig
from penstock.configs.secrets import resolve

_RESERVED = {
    "num_envs": "set actors.envs",
    "num_games": "set actors.envs, which is the number of seats of all games",
    "vectorization_mode": "the fastest is taken",
    "vector_kwargs": "give the vector environment's options in env.kwargs",
    "wrappers": "set env.wrappers",
}
# Wrappers that hold observations of earlier steps.
KEEP_OBSERVATIONS = (gymnasium.wrappers.FrameStackObservation, gymnasium.wrappers.DelayObservation)
# Options of `gymnasium.make` itself; `make_vec` has only the first one.
_GYMNASIUM_OPTIONS = ("max_episode_steps", "disable_env_checker")


class FirstIndex(IntEnum):
    """The `index` of the first environment of a process that is no actor.

    A function with a parameter `index` gets the number of the environment there, such as for a port
    of its own. Actors count theirs from 0 (`first_index`).
    """

    COMMAND = 10_000
    """Environments of `penstock eval`, and of whatever else plays a stored policy."""
    LEARNER = 11_000
    """The environment that learner 0 makes to read its spaces."""
    MEASURED = 12_000
    """Environments that are timed before a run."""
    EVALUATOR = 15_000
    TOURNAMENT = 16_000
    """Environments in which the evaluator plays members of a pool against each other."""
    VIDEO = 17_000
    CHECK = 18_000
    """Single environments of `penstock check-env`."""
    RATED = 19_000
    """The vector whose rate `penstock check-env` measures. Its numbers are others, as closed
    environments may hold their ports for a while."""


# The numbers of actors' environments beyond those of `FirstIndex` begin here.
AFTER_OTHERS = 20_000


def first_index(actor: int, envs: int) -> int:
    """Returns the `index` of the first of an actor's ``envs`` environments.

    Environments are counted through all actors, without the numbers of `FirstIndex`.
    """
    first = actor * envs
    if first + envs <= FirstIndex.COMMAND:
        return first
    return first + envs + AFTER_OTHERS


@dataclass(frozen=True)
class _Source:
    """The ways in which an environment can be made."""

    single: Callable[..., gymnasium.Env[Any, Any]] | None = None
    """Makes a single environment."""
    vector: Callable[..., VectorEnv] | None = None
    """Makes its own vector form, of a given number of environments."""
    takes_index: bool = False
    """Whether both take the keyword `index`."""
    of_games: bool = False
    """Whether the vector form is made of a given number of games, whose seats are the rows."""
    vector_name: str = ""
    """What steps the vector form, in a sentence to print."""
    has_threads: bool = False
    """Whether the vector form has threads."""
    frames_per_step: int = 1
    """Emulator frames in one agent step."""

    def index_keyword(self, index: int) -> dict[str, int]:
        """Returns the keywords of an environment, or of a vector that begins with it."""
        return {"index": index} if self.takes_index else {}

    def uses_vector(self, env: EnvConfig) -> bool:
        """Whether environments are made in the vector form.

        Wrappers, and the reset of a failed episode, need single environments.
        """
        return self.vector is not None and not env.wrappers and env.on_error != "drop_episode"


class Adapter(NamedTuple):
    """Another library, whose environments have ids of their own behind a prefix."""

    library: str
    make: Callable[[str, Mapping[str, Any], int, int], VectorEnv]
    """Makes environments: (id without the prefix, env.kwargs, their number, threads) -> vector."""
    has_threads: bool
    """Whether those threads step the environments."""
    of_games: bool = False
    """Whether the number is of games, whose seats are the rows."""
    may_render: bool = False
    """Whether environments may take `render_mode`."""


ADAPTERS: dict[str, Adapter] = {
    envpool.PREFIX: Adapter("EnvPool", envpool.PoolVectorEnv, has_threads=True),
    pettingzoo.PREFIX: Adapter(
        "PettingZoo",
        pettingzoo.ZooVectorEnv,
        has_threads=False,
        of_games=True,
        may_render=True,
    ),
}
"""The adapters by the prefix of their environments' ids."""


class Makers(NamedTuple):
    """Constructors of an environment: a single one, and its own vector form."""

    single: Callable[[], gymnasium.Env[Any, Any]] | None
    vector: Callable[[int], VectorEnv] | None
    """Makes so many environments, or so many games of several seats."""
    takes_index: bool = False
    """Whether each environment gets a number of its own, by which it may differ from others."""
    of_games: bool = False
    """Whether the vector is of games."""


def make(
    env: EnvConfig,
    count: int,
    threads: int = 1,
    *,
    whole_games: bool = False,
    filmed: bool = False,
    first: int = FirstIndex.COMMAND,
    stagger: bool = False,
    beat: Callable[[], object] | None = None,
) -> BatchedEnv:
    """Make `count` environments, in the fastest way that the config allows.

    Args:
        env: the config's section.
        count: number of environments, which are the rows: the seats of all games.
        threads: of the environment's own vector form if it has any; else threads that step single
            environments side by side.
        whole_games: where games have several seats, make as many more rows as whole games need;
            without it such a number is refused.
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
    with explaining_errors(purpose), users_side():
        source = _find_source(env, threads, filmed)
        frames_per_step = source.frames_per_step

        # Make the vector, and the sentence that tells the user what steps it.
        vector: VectorEnv
        if source.vector and source.uses_vector(env):
            if source.of_games:
                vector = _vector_of_games(source, env.id, count, first, whole_games=whole_games)
                count = vector.num_envs
            else:
                vector = _own_vector(source.vector, purpose, count, **source.index_keyword(first))
            how = f"{env.id} is stepped by {source.vector_name}"
            if source.of_games:
                seats = vector.metadata.get(SEATS, 1)
                how += f", {seats} seat{'s' * (seats > 1)} a game"
            if threads > 1 and not source.has_threads:
                how += f", and actors.env_threads={threads} does nothing for it"
        elif source.single:
            makes = _single_makers(source, env, count, first=first, stagger=stagger, beat=beat)
            vector, how = _vector_of_singles(makes, threads, beat)
            frame_skip = getattr(vector.envs[0].unwrapped, "frame_skip", None)
            if isinstance(frame_skip, int):
                frames_per_step = frame_skip
            how = f"{env.id} is stepped {how}"
            if source.vector:
                cause = "env.wrappers turn" if env.wrappers else "env.on_error=drop_episode turns"
                how += f": {cause} {source.vector_name} off, which is faster"
        else:
            raise _needs_singles(purpose, env)

        # A function of the user may have returned anything.
        if not isinstance(vector, VectorEnv) or vector.num_envs != count:
            raise UserError(f"{purpose} must return a VectorEnv of num_envs={count}, not {vector}")
        if not source.of_games and SEATS in (vector.metadata or {}):
            raise UserError(
                f"{purpose} has metadata[{SEATS!r}], which vectors of games have; let the function "
                "that makes it take num_games instead of num_envs"
            )
        claim(purpose, vector)
        return BatchedEnv(
            name=env.id,
            vector=vector,
            frames_per_step=frames_per_step,
            how=how,
            record=env.record,
            embed_above=env.embed_above,
        )


def _vector_of_games(
    source: _Source, name: str, count: int, first: int, *, whole_games: bool
) -> VectorEnv:
    """Make games of several seats, so many that their rows are ``count``.

    Args:
        source: of the games.
        name: of the environment, for messages.
        count: the number of rows.
        first: the `index` of the first game.
        whole_games: whether a number that is not divisible by the seats is rounded up.

    Raises:
        UserError: for such a number otherwise, or if what is made has other rows.
    """
    assert source.vector is not None
    make_vector = source.vector
    index = source.index_keyword(first)

    def make_games(games: int) -> VectorEnv:
        return _own_vector(make_vector, f"environment {name}", games, **index)

    # Only a game that has been made says how many seats it has.
    vector = make_games(1)
    metadata = vector.metadata if isinstance(vector, VectorEnv) else None
    seats = seating_of(name, metadata or {}).seats
    if not whole_games:
        check_rows(name, count, seats)
    games = -(-count // seats)
    if games > 1 and isinstance(vector, VectorEnv):
        vector.close()
        vector = make_games(games)

    if not isinstance(vector, VectorEnv) or vector.num_envs != games * seats:
        raise UserError(
            f"environment {name} must return a VectorEnv of num_envs={games * seats} for "
            f"num_games={games}, as its metadata has seats={seats}, not {vector}"
        )
    return vector


def _single_makers(
    source: _Source,
    env: EnvConfig,
    count: int,
    *,
    first: int,
    stagger: bool,
    beat: Callable[[], object] | None,
) -> list[Callable[[], gymnasium.Env[Any, Any]]]:
    """Returns the constructors of single environments, wrapped as the config says.

    Arguments as of `make`.
    """
    assert source.single is not None
    wrapped = partial(_wrapped, source.single, env, f"environment {env.id}")
    makes: list[Callable[[], gymnasium.Env[Any, Any]]] = [
        partial(wrapped, **source.index_keyword(first + i)) for i in range(count)
    ]

    if stagger:
        makes = staggered(makes, first)
    if env.on_error == "drop_episode":
        makes = [partial(_dropping, make_single, env.id) for make_single in makes]
    if beat is not None:
        makes = [partial(_make_and_beat, make_single, beat) for make_single in makes]
    return makes


def _vector_of_singles(
    makes: Sequence[Callable[[], gymnasium.Env[Any, Any]]],
    threads: int,
    beat: Callable[[], object] | None,
) -> tuple[SinglesVectorEnv, str]:
    """Make a vector of single environments.

    Returns:
        The vector, and how it steps them, in words that continue "is stepped".
    """
    if threads > 1:
        how = f"side by side, by up to {threads} threads"
        return ThreadedVectorEnv(makes, threads, beat=beat), how
    return SinglesVectorEnv(makes, beat=beat), "one by one, by gymnasium's SyncVectorEnv"


def _needs_singles(purpose: str, env: EnvConfig) -> UserError:
    """Returns the error for options that need single environments, of which there are none."""
    if env.on_error == "drop_episode":
        return UserError(
            f"{purpose} comes as a vector environment only, and env.on_error=drop_episode "
            "resets single ones; reset a row that fails where it is stepped, and set "
            "env.on_error=fail"
        )
    return UserError(
        f"{purpose} comes as a vector environment only, and env.wrappers go around single "
        "ones; wrap it where it is made, and leave env.wrappers empty"
    )


def makers(env: EnvConfig) -> Makers:
    """Returns the constructors that `make` would use, for `penstock check-env`.

    Each call of a constructor gives the environments new numbers, from `FirstIndex.CHECK` on. The
    constructors raise UserError on failure.

    Raises:
        UserError: if there is no such environment.
    """
    purpose = f"environment {env.id}"
    env = resolve(env)
    with explaining_errors(purpose):
        source = _find_source(env, threads=1, filmed=False)
    indices = counted_from(FirstIndex.CHECK)

    @explaining_errors(purpose)
    def make_single() -> gymnasium.Env[Any, Any]:
        assert source.single is not None
        return _wrapped(source.single, env, purpose, **source.index_keyword(next(indices)))

    @explaining_errors(purpose)
    def make_vector(size: int) -> VectorEnv:
        assert source.vector is not None
        first, *_ = islice(indices, size)
        return _own_vector(source.vector, purpose, size, **source.index_keyword(first))

    return Makers(
        single=make_single if source.single else None,
        vector=make_vector if source.vector and not env.wrappers else None,
        takes_index=source.takes_index,
        of_games=source.of_games,
    )


def uses_threads(env: EnvConfig) -> bool:
    """Returns whether `actors.env_threads` step the environments of `env`.

    Raises:
        UserError: as `make`.
    """
    with explaining_errors(f"environment {env.id}"), users_side():
        source = _find_source(resolve(env), threads=1, filmed=False)
    return source.has_threads or not source.uses_vector(env)


def probe(env: EnvConfig, threads: int = 1, first: int = FirstIndex.LEARNER) -> EnvInfo:
    """Returns the properties of the environments of `env`: makes one, or a game, and closes it.

    Of games that drive their own loop none is made. Arguments as of `make`.

    Raises:
        UserError: as `make`.
    """
    if env.id == GAMES_ID:
        return games_info(env)
    batched_env = make(env, count=1, threads=threads, whole_games=True, first=first)
    batched_env.close()
    return batched_env.info


def _find_source(env: EnvConfig, threads: int, filmed: bool) -> _Source:
    """Find how the environment of an id can be made.

    The id is looked up under the prefixes of `ADAPTERS`, then as a function of its module, then in
    gymnasium's registry.

    Args:
        env: the config's section.
        threads: for an own vector form that has threads.
        filmed: whether the environments are asked to render themselves.

    Raises:
        UserError: if there is no such environment, or for options that it does not take.
    """
    if env.id == GAMES_ID:
        raise refuse_to_make()

    # Behind a prefix there may be a function of the user.
    purpose = f"environment {env.id}"
    for prefix, adapter in ADAPTERS.items():
        if env.id.startswith(prefix):
            name = env.id.removeprefix(prefix)
            return _from_adapter(adapter, name, env, threads=threads, filmed=filmed)

    module_name, _, name = env.id.rpartition(":")
    module = import_module(module_name, purpose) if module_name else None

    function = getattr(module, name, None)
    if callable(function):
        return _from_function(function, env, filmed)

    # ale-py registers its ids when it is imported; also old ones, which have no prefix. If it is
    # not installed, that matters only for an id with its prefix.
    is_atari = name.startswith(atari.PREFIX)
    if name not in gymnasium.registry:
        with nullcontext() if is_atari else suppress(UserError):
            atari.register(purpose)

    spec = gymnasium.registry.get(name)
    atari.refuse_raw(name, spec, env)
    if spec is None:
        raise _unknown(name, module, purpose)
    if is_atari:
        return _from_atari(spec, env, threads, filmed)
    return _from_spec(spec, env, filmed)


def _from_function(function: Callable[..., Any], env: EnvConfig, filmed: bool) -> _Source:
    """The source that a function of the user is, by its parameters."""
    check_keywords(function, env.kwargs, f"environment {env.id}", reserved=_RESERVED)
    plain_kwargs = _with_next_step(function, env.kwargs)
    takes_index = "index" in parameters(function) and "index" not in plain_kwargs

    is_asked_to_render = filmed and "render_mode" in parameters(function)
    kwargs = plain_kwargs
    if is_asked_to_render:
        kwargs = {**kwargs, "render_mode": rendering.RENDER_MODE}

    if "num_games" in parameters(function):
        return _Source(
            vector=lambda games, **index: function(num_games=games, **index, **deepcopy(kwargs)),
            takes_index=takes_index,
            of_games=True,
            vector_name="its own vector form",
        )
    if "num_envs" in parameters(function):
        return _Source(
            vector=lambda count, **index: function(num_envs=count, **index, **deepcopy(kwargs)),
            takes_index=takes_index,
            vector_name="its own vector form",
        )

    def make_single(**index: int) -> Any:
        if is_asked_to_render:
            return _rendering_or_plain(partial(function, **index), kwargs, plain_kwargs)
        return function(**index, **deepcopy(kwargs))

    return _Source(single=make_single, takes_index=takes_index)


def _rendering_or_plain(
    function: Callable[..., Any], kwargs: Mapping[str, Any], plain_kwargs: Mapping[str, Any]
) -> Any:
    """Make the environment of a function that is asked to render.

    If it renders nothing, the environment is made again without that request; also if it refuses,
    and declares only other ways to render.

    Args:
        function: makes a single environment.
        kwargs: the keywords with the request to render.
        plain_kwargs: the keywords without it.
    """
    try:
        single = function(**deepcopy(kwargs))
    except (TypeError, ValueError, AssertionError):
        single = function(**deepcopy(plain_kwargs))
        if not rendering.draws_otherwise(single):
            raise
        return single

    if not rendering.draws_otherwise(single):
        return single
    single.close()
    return function(**plain_kwargs)


def _from_atari(spec: EnvSpec, env: EnvConfig, threads: int, filmed: bool) -> _Source:
    """The source of a game of Atari: ale-py's vector environment, also for a single game."""
    options = atari.options(env.id, spec.kwargs, env.kwargs)
    if env.wrappers and options["episodic_life"]:
        raise UserError(
            f"environment {env.id}: episodic_life is not possible with env.wrappers, which wrap a "
            "single game; set env.kwargs.episodic_life=false, or leave env.wrappers empty"
        )

    def make_vector(count: int, threads: int = threads) -> VectorEnv:
        games = atari.make_vector(options, count, threads)
        vector = rendering.FilmedAtari(games, options) if filmed else games
        return LivesAsEpisodes(vector, options) if options["episodic_life"] else vector

    return _Source(
        single=lambda: SingleEnv(make_vector(1, threads=1)),
        vector=make_vector,
        vector_name="ale_py.AtariVectorEnv",
        has_threads=True,
        frames_per_step=options["frameskip"],
    )


def _from_adapter(
    adapter: Adapter, name: str, env: EnvConfig, *, threads: int, filmed: bool
) -> _Source:
    """The source of another library's environment, called ``name`` there."""

    def make_vector(count: int) -> VectorEnv:
        if filmed and adapter.may_render:
            kwargs = {"render_mode": rendering.RENDER_MODE, **env.kwargs}
            with suppress(UserError, TypeError, ValueError, AssertionError):
                return adapter.make(name, kwargs, count, threads)
        return adapter.make(name, env.kwargs, count, threads)

    return _Source(
        vector=make_vector,
        of_games=adapter.of_games,
        vector_name=adapter.library,
        has_threads=adapter.has_threads,
    )


def _from_spec(spec: EnvSpec, env: EnvConfig, filmed: bool) -> _Source:
    """The source of an environment that is registered with gymnasium."""
    has_vector = bool(spec.vector_entry_point and not spec.additional_wrappers)
    make_single = partial(_registered_single, spec, env)
    if filmed:
        has_vector, env = _drawing(spec, env, has_vector)
        make_single = partial(
            _filmed_single, drawing=partial(_registered_single, spec, env), plain=make_single
        )

    return _Source(
        single=make_single if spec.entry_point else None,
        vector=partial(_registered_vector, spec, env) if has_vector else None,
        of_games=has_vector and _takes_games(spec, env),
        vector_name="its own vector form",
    )


def _drawing(spec: EnvSpec, env: EnvConfig, has_vector: bool) -> tuple[bool, EnvConfig]:
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
        is_usable = not is_vector or (has_vector and not env.wrappers)
        if entry_point is None or not is_usable:
            continue

        creator = load(entry_point, purpose) if isinstance(entry_point, str) else entry_point
        if rendering.draws(creator) or (not is_vector and _may_draw(creator)):
            kwargs = {"render_mode": rendering.RENDER_MODE, **env.kwargs}
            return is_vector, env.model_copy(update={"kwargs": kwargs})
    return has_vector, env


def _may_draw(creator: Callable[..., Any]) -> bool:
    """Returns whether a function takes `render_mode`; it has no metadata that would show it."""
    arguments = parameters(creator)
    passes_on = any(p.kind is p.VAR_KEYWORD for p in arguments.values())
    return not isinstance(creator, type) and (passes_on or "render_mode" in arguments)


def _filmed_single(
    *, drawing: Callable[[], gymnasium.Env[Any, Any]], plain: Callable[[], gymnasium.Env[Any, Any]]
) -> gymnasium.Env[Any, Any]:
    """Make the environment that is asked to render, or the plain one if it refuses or cannot."""
    with suppress(TypeError, ValueError, AssertionError):
        single = drawing()
        if rendering.draws(single):
            return single
        single.close()
    return plain()


def _registered_single(spec: EnvSpec, env: EnvConfig) -> gymnasium.Env[Any, Any]:
    """Make a single environment that is registered with gymnasium."""
    _creator(spec.entry_point, env, own_options=_GYMNASIUM_OPTIONS)
    kwargs: dict[str, Any] = deepcopy(env.kwargs)
    return gymnasium.make(spec, **kwargs)


def _registered_vector(spec: EnvSpec, env: EnvConfig, count: int) -> VectorEnv:
    """Make the vector form of an environment that is registered with gymnasium."""
    creator = _creator(spec.vector_entry_point, env, own_options=_GYMNASIUM_OPTIONS[:1])
    kwargs = _with_next_step(creator, deepcopy(env.kwargs))
    if "num_games" in parameters(creator):
        # gymnasium knows no seats.
        games: VectorEnv = creator(num_games=count, **{**deepcopy(spec.kwargs), **kwargs})
        return games

    vector = gymnasium.make_vec(spec, count, "vector_entry_point", **kwargs)

    if type(vector.action_space) is MultiDiscrete:
        vector.action_space = _Unchecked(vector.action_space)
    return vector


def _takes_games(spec: EnvSpec, env: EnvConfig) -> bool:
    """Returns whether the vector form of a registered environment is made of games."""
    creator: Any = spec.vector_entry_point
    if isinstance(creator, str):
        creator = load(creator, f"environment {env.id}")
    return "num_games" in parameters(creator)


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
    entry_point: str | Callable[..., Any] | None, env: EnvConfig, own_options: Collection[str]
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
    check_keywords(creator, env.kwargs, purpose, more=own_options, reserved=_RESERVED)
    return creator


def _with_next_step(creator: Callable[..., Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `kwargs`, with autoreset mode NEXT_STEP if a vector environment lets one choose."""
    if "autoreset_mode" in parameters(creator):
        return {"autoreset_mode": AutoresetMode.NEXT_STEP, **kwargs}
    return dict(kwargs)


def _wrapped(
    make_single: Callable[..., gymnasium.Env[Any, Any]],
    env: EnvConfig,
    purpose: str,
    **index: int,
) -> gymnasium.Env[Any, Any]:
    """Make a single environment with the wrappers of the config.

    Args:
        make_single: makes the environment without them.
        env: the config's section.
        purpose: the environment, in words for errors.
        index: the keyword `index` if the environment takes it.

    Raises:
        UserError: if it is no environment, or a wrapper cannot be made.
    """
    single = make_single(**index)
    if not isinstance(single, gymnasium.Env):
        raise UserError(
            f"{purpose} must return a gymnasium.Env, not {type(single).__name__}; to return a "
            "vector environment, let its function take num_envs"
        )
    # gymnasium reads the metadata of each environment.
    if single.metadata is None:
        single.unwrapped.metadata = {}

    for entry in env.wrappers:
        path, kwargs = (entry, {}) if isinstance(entry, str) else next(iter(entry.items()))
        name = f"wrapper {path}"
        with explaining_errors(name, "env.wrappers"):
            wrapper = load(path, name)
            check_keywords(wrapper, kwargs, name, reserved={"env": "the environment is given"})
            if isinstance(wrapper, type) and issubclass(wrapper, KEEP_OBSERVATIONS):
                single = _Copied(single)
            single = wrapper(single, **deepcopy(kwargs))

    refuse_statistics(purpose, single)
    return single


def _dropping(make_single: Callable[[], gymnasium.Env[Any, Any]], name: str) -> DropFailedEpisodes:
    return DropFailedEpisodes(make_single(), name)


def _make_and_beat(
    make_single: Callable[[], gymnasium.Env[Any, Any]], beat: Callable[[], object]
) -> gymnasium.Env[Any, Any]:
    """Make an environment, and report that as progress."""
    single = make_single()
    beat()
    return single


class _Copied(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Gives copies of observations to a wrapper that holds them.

    An environment may write to the same array in every step.
    """

    def reset(self, **kwargs: Any) -> Any:
        observation, info = self.env.reset(**kwargs)
        return copy_observation(observation), info

    def step(self, action: Any) -> Any:
        observation, *outcome = self.env.step(action)
        return copy_observation(observation), *outcome


def _own_vector(
    make_vector: Callable[..., VectorEnv], purpose: str, count: int, **index: int
) -> VectorEnv:
    """Make the vector form, of ``count`` environments.

    Args:
        make_vector: makes it; of the user's code, so it may return anything.
        purpose: the environment, in words for errors.
        count: number of environments.
        index: the keyword `index` if the environment takes it.
    """
    vector = make_vector(count, **index)
    if isinstance(vector, VectorEnv):
        refuse_statistics(purpose, vector)
    return vector
