"""A user's algorithm: its functions, and those of Penstock's algorithms where it has none.

The functions are those of a module, or of the object that a class or function of a module returns.
An algorithm that trains on fresh unrolls, as `penstock.algos.impala` and `penstock.algos.ppo` do,
has

    STATISTICS    names of the sums that `loss` returns
    loss          (net, batch, cfg, envs, add_others) -> loss, sums

and, if it wants,

    prepare       (net, batch, cfg, parts, add_others) -> more columns, once for each batch
    going_on      (net, batch, cfg, parts, add_others) -> bool, between epochs
    whole         (cfg) -> bool: whether `loss` must see all environments of an update at once;
                  only then may it call ``add_others``
    columns, check, process    what actors record; those of IMPALA by default

`penstock.algos.base.UnrollAlgorithm` explains them. An algorithm that draws transitions from
replay, as `penstock.algos.dqn` and `penstock.algos.sac` do, has

    network           (config, spaces) -> the network that actors get
    action_sampler    (config, spaces, seed, actor) -> how they choose actions by its outputs
    Update            (cfg, context) -> a `penstock.algos.replay_update.ReplayUpdate`

and, if it wants,

    columns, check, process    by default those of DQN for Discrete and those of SAC for Box
                               actions; MultiDiscrete actions are recorded as integers, without
                               priorities of actors
    BATCH_COLUMNS              names of recorded columns that `Update.take` gets, too

Either may have `Settings`, a dataclass or pydantic model of the options in ``algo.settings``.
``cfg``, and ``algo`` of ``config``, are `CustomConfig`, whose ``settings`` are those that its
`Settings` made. Actors import the module too: one that imports torch within its functions lets them
start faster.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from gymnasium.spaces import Discrete
from pydantic import ValidationError

from penstock.algos import slots
from penstock.algos.base import Columns, ReplayAlgorithm, UnrollAlgorithm
from penstock.algos.custom.config import CustomConfig
from penstock.algos.dqn import algorithm as dqn
from penstock.algos.impala import algorithm as impala
from penstock.algos.sac import algorithm as sac
from penstock.configs.algorithms import Data
from penstock.configs.errors import UserError
from penstock.configs.schema import Config
from penstock.core.interfaces import Transitions
from penstock.core.loading import check_keywords, explaining_errors, import_module, load
from penstock.core.observations import Spaces
from penstock.core.specs import Column
from penstock.models.acting.categorical import ActionSampler
from penstock.models.actions import action_column
from penstock.models.fitting import HeadShape

if TYPE_CHECKING:
    from penstock.algos.replay_update import ReplayUpdate, UpdateContext

Custom = UnrollAlgorithm[CustomConfig] | ReplayAlgorithm[CustomConfig]


class Kind(NamedTuple):
    """What an algorithm must have for one kind of training data."""

    needed: tuple[str, ...]
    examples: str


KINDS: dict[Data, Kind] = {
    "unrolls": Kind(
        ("STATISTICS", "loss"), "penstock/algos/ppo/algorithm.py and examples/own_algorithm.py"
    ),
    "transitions": Kind(
        ("network", "action_sampler", "Update"),
        "penstock/algos/dqn and examples/own_offpolicy.py",
    ),
}
OPTIONAL = ("prepare", "going_on", "whole")  # optional functions of an algorithm on unrolls
UPDATE_MEMBERS = ("statistics", "published", "take", "state", "loaded")  # those of `ReplayUpdate`
SAMPLER_COLUMNS = {"q_taken", "q_max"}  # columns that only a sampler of actions can fill


class CustomFactory:
    """Loads the algorithm of ``algo.entry``."""

    def for_config(self, cfg: CustomConfig) -> Custom:
        return custom(cfg.entry, cfg.data)


CUSTOM = CustomFactory()


@cache
def custom(entry: str, data: Data) -> Custom:
    """Returns the algorithm of ``algo.entry``, which is loaded once.

    Functions that it lacks are those of Penstock's own algorithms.

    Raises:
        UserError: if it cannot be loaded, has too few functions, or has those of the other kind of
            data.
    """
    purpose = f"algo.entry {entry}"
    module, _, name = entry.partition(":")
    if name:
        maker: Any = load(entry, purpose)
        _check_maker(maker, module, purpose)
        with explaining_errors(purpose, "algo.entry"):
            definition = maker()
    else:
        definition = import_module(module, purpose)

    _check(definition, purpose, data)
    if data == "unrolls":
        return _on_unrolls(definition, purpose)
    return _on_transitions(definition, purpose)


def _check_maker(maker: Any, module: str, purpose: str) -> None:
    """Refuse a class or function that does not make an algorithm of the user.

    A module that the user allows may have imported any other class or function. A class must have
    what an algorithm needs, and a function must come from the user's package.
    """
    if inspect.isclass(maker):
        is_allowed = any(hasattr(maker, name) for kind in KINDS.values() for name in kind.needed)
    else:
        package = module.partition(".")[0]
        is_of_package = str(maker.__module__).partition(".")[0] == package
        is_allowed = inspect.isfunction(maker) and is_of_package

    if not is_allowed:
        needed = " or ".join(_listed(kind.needed) for kind in KINDS.values())
        raise UserError(
            f"{purpose} makes no algorithm; name a class that has {needed}, or a function of "
            f"{module} that returns an object that has them"
        )


def _check(definition: Any, purpose: str, data: Data) -> None:
    """Raise UserError unless an algorithm has what its kind of data needs."""
    needed, examples = KINDS[data]
    missing = [name for name in needed if not hasattr(definition, name)]
    if not missing:
        return

    # An algorithm for the other kind of data may only need another value of `algo.data`.
    for other_data, kind in KINDS.items():
        if other_data != data and all(hasattr(definition, name) for name in kind.needed):
            raise UserError(
                f"{purpose} trains on {other_data}, as it has {_listed(kind.needed)}, and "
                f"algo.data is {data}; set algo.data={other_data}"
            )

    condition = " with algo.data transitions" if data == "transitions" else ""
    raise UserError(
        f"{purpose} has no {' and no '.join(missing)}; an algorithm{condition} has "
        f"{_listed(needed)}, as {examples} do"
    )


def _listed(names: tuple[str, ...]) -> str:
    *first_names, last = names
    return f"{', '.join(first_names)} and {last}"


def _on_unrolls(definition: Any, purpose: str) -> UnrollAlgorithm[CustomConfig]:
    """Returns the algorithm on fresh unrolls that has the functions of ``definition``."""

    def process(cfg: CustomConfig, columns: Columns) -> None:
        if hasattr(definition, "process"):
            definition.process(_settled(definition, purpose, cfg), columns)
        else:
            slots.process(cfg, columns)

    return UnrollAlgorithm(
        statistics=tuple(definition.STATISTICS),
        columns=getattr(definition, "columns", impala.columns),
        check=getattr(definition, "check", impala.check),
        process=process,
        loss=definition.loss,
        resolve_options=lambda cfg: _settled(definition, purpose, cfg),
        **{name: getattr(definition, name) for name in OPTIONAL if hasattr(definition, name)},
    )


class _TransitionFunctions:
    """The functions of a `ReplayAlgorithm`, by those of a user's ``definition``."""

    def __init__(self, definition: Any, purpose: str) -> None:
        self._definition = definition
        self._purpose = purpose
        """Names the algorithm in messages."""
        self.columns = getattr(definition, "columns", _columns)

    def process(self, cfg: CustomConfig, columns: Columns) -> None:
        if hasattr(self._definition, "process"):
            self._definition.process(self._settled_cfg(cfg), columns)
        elif "priority" in columns:
            dqn.prioritize(cfg, cfg.n_step, columns)
        else:
            slots.process(cfg, columns)

    def network(self, config: Config, spaces: Spaces) -> HeadShape:
        shape: HeadShape = self._definition.network(self._settled_config(config), spaces)
        return shape

    def action_sampler(
        self, config: Config, spaces: Spaces, seed: int, actor: int
    ) -> ActionSampler:
        """Returns the user's sampler; UserError if it leaves columns empty that slots have."""
        settled = self._settled_config(config)
        sampler: ActionSampler = self._definition.action_sampler(settled, spaces, seed, actor)

        columns = self.columns(spaces.observation_space, spaces.action_space)
        needed = {column.name for column in columns} & SAMPLER_COLUMNS
        if missing := sorted(needed - sampler.recorded.keys()):
            raise UserError(
                f"{self._purpose}: its action_sampler does not record {' and '.join(missing)}, "
                "which its slots hold; record them, as that of algo.name dqn does, or give columns "
                "of its own"
            )
        return sampler

    def make_update(self, cfg: CustomConfig, ctx: UpdateContext) -> ReplayUpdate:
        """Makes the user's update; UserError if it lacks something of `ReplayUpdate`."""
        update: ReplayUpdate = self._definition.Update(self._settled_cfg(cfg), ctx)
        if missing := [name for name in UPDATE_MEMBERS if not hasattr(update, name)]:
            raise UserError(
                f"{self._purpose}: its Update has no {' and no '.join(missing)}; an Update has "
                f"{_listed(UPDATE_MEMBERS)}, as that of examples/own_offpolicy.py does"
            )
        return update

    def _settled_cfg(self, cfg: CustomConfig) -> CustomConfig:
        return _settled(self._definition, self._purpose, cfg)

    def _settled_config(self, config: Config) -> Config:
        cfg = config.algo
        assert isinstance(cfg, CustomConfig), cfg
        return config.model_copy(update={"algo": self._settled_cfg(cfg)})


def _on_transitions(definition: Any, purpose: str) -> ReplayAlgorithm[CustomConfig]:
    """Returns the algorithm on transitions that has the functions of ``definition``."""
    functions = _TransitionFunctions(definition, purpose)
    return ReplayAlgorithm(
        columns=functions.columns,
        check=getattr(definition, "check", _check_columns),
        process=functions.process,
        network=functions.network,
        action_sampler=functions.action_sampler,
        make_update=functions.make_update,
        data=lambda cfg: Transitions(cfg.n_step),
        batch_columns=tuple(getattr(definition, "BATCH_COLUMNS", ())),
    )


def _columns(observation_space: Any, action_space: Any) -> tuple[Column, ...]:
    """Returns the columns of an algorithm on transitions that has none of its own."""
    if isinstance(action_space, Discrete):
        return dqn.columns(observation_space, action_space)
    return slots.columns(observation_space, action_column(action_space))


def _check_columns(columns: Columns, spaces: Spaces) -> None:
    """Raise ValueError for values that no sound actor records in `_columns`."""
    check = dqn.check if columns["action"].dtype.kind == "i" else sac.check
    check(columns, spaces)


def _settled(definition: Any, purpose: str, cfg: CustomConfig) -> CustomConfig:
    """Returns ``cfg`` with the object that the algorithm's `Settings` makes of its ``settings``.

    Raises:
        UserError: if `Settings` does not take them, or there is none.
    """
    settings_type = getattr(definition, "Settings", None)
    if settings_type is None:
        if cfg.settings:
            raise UserError(
                f"{purpose} has no Settings, a dataclass or pydantic model, to make "
                f"algo.settings {cfg.settings} of; write one, or set algo.settings={{}}"
            )
        return cfg

    settings = _make_settings(settings_type, purpose, cfg.settings)
    return cfg.model_copy(update={"settings": settings})


def _make_settings(
    settings_type: Callable[..., Any], entry_purpose: str, options: Mapping[str, Any]
) -> Any:
    """Returns the `Settings` object of ``options``; UserError if it refuses them."""
    purpose = f"algo.settings for {entry_purpose}"
    check_keywords(settings_type, options, purpose)

    with explaining_errors(purpose, "algo.settings"):
        try:
            return settings_type(**options)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise UserError(f"{purpose}: {'; '.join(problems)}; correct algo.settings") from error
