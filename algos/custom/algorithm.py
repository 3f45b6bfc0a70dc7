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
from penstock.core.loading import check_keywords, explained, import_module, load
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
OPTIONAL = ("prepare", "going_on", "whole")  # on unrolls
OF_UPDATE = ("statistics", "published", "take", "state", "loaded")
OF_ACTIONS = {"q_taken", "q_max"}  # columns that only a sampler of actions can fill


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
    own: Any = load(entry, purpose) if name else import_module(module, purpose)
    if name:
        _check_maker(own, module, purpose)
        with explained(purpose, "algo.entry"):
            own = own()
    _check(own, purpose, data)
    return _on_unrolls(own, purpose) if data == "unrolls" else _on_transitions(own, purpose)


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


def _check(own: Any, purpose: str, data: Data) -> None:
    needed, examples = KINDS[data]
    missing = [name for name in needed if not hasattr(own, name)]
    if not missing:
        return
    for other, kind in KINDS.items():
        if other != data and all(hasattr(own, name) for name in kind.needed):
            raise UserError(
                f"{purpose} trains on {other}, as it has {_listed(kind.needed)}, and algo.data is "
                f"{data}; set algo.data={other}"
            )
    raise UserError(
        f"{purpose} has no {' and no '.join(missing)}; an algorithm"
        f"{' with algo.data transitions' if data == 'transitions' else ''} has {_listed(needed)}, "
        f"as {examples} do"
    )


def _listed(names: tuple[str, ...]) -> str:
    *most, last = names
    return f"{', '.join(most)} and {last}"


def _on_unrolls(own: Any, purpose: str) -> UnrollAlgorithm[CustomConfig]:
    def process(cfg: CustomConfig, columns: Columns) -> None:
        if hasattr(own, "process"):
            own.process(_settled(own, purpose, cfg), columns)
        else:
            slots.process(cfg, columns)

    return UnrollAlgorithm(
        tuple(own.STATISTICS),
        getattr(own, "columns", impala.columns),
        getattr(own, "check", impala.check),
        process,
        own.loss,
        settled=lambda cfg: _settled(own, purpose, cfg),
        **{name: getattr(own, name) for name in OPTIONAL if hasattr(own, name)},
    )


def _on_transitions(own: Any, purpose: str) -> ReplayAlgorithm[CustomConfig]:
    columns = getattr(own, "columns", _columns)

    def process(cfg: CustomConfig, columns: Columns) -> None:
        if hasattr(own, "process"):
            own.process(_settled(own, purpose, cfg), columns)
        elif "priority" in columns:
            dqn.prioritize(cfg, cfg.n_step, columns)
        else:
            slots.process(cfg, columns)

    def settled(config: Config) -> Config:
        cfg = config.algo
        assert isinstance(cfg, CustomConfig), cfg
        return config.model_copy(update={"algo": _settled(own, purpose, cfg)})

    def network(config: Config, spaces: Spaces) -> HeadShape:
        found: HeadShape = own.network(settled(config), spaces)
        return found

    def action_sampler(config: Config, spaces: Spaces, seed: int, actor: int) -> ActionSampler:
        found: ActionSampler = own.action_sampler(settled(config), spaces, seed, actor)
        names = {column.name for column in columns(spaces.observation_space, spaces.action_space)}
        if missing := sorted(names & OF_ACTIONS - found.recorded.keys()):
            raise UserError(
                f"{purpose}: its action_sampler does not record {' and '.join(missing)}, which its "
                "slots hold; record them, as that of algo.name dqn does, or give columns of its own"
            )
        return found

    def make_update(cfg: CustomConfig, ctx: UpdateContext) -> ReplayUpdate:
        found: ReplayUpdate = own.Update(_settled(own, purpose, cfg), ctx)
        if missing := [name for name in OF_UPDATE if not hasattr(found, name)]:
            raise UserError(
                f"{purpose}: its Update has no {' and no '.join(missing)}; an Update has "
                f"{_listed(OF_UPDATE)}, as that of examples/own_offpolicy.py does"
            )
        return found

    return ReplayAlgorithm(
        columns,
        getattr(own, "check", _check_columns),
        process,
        network,
        action_sampler,
        make_update,
        data=lambda cfg: Transitions(cfg.n_step),
        batch_columns=tuple(getattr(own, "BATCH_COLUMNS", ())),
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


def _settled(own: Any, purpose: str, cfg: CustomConfig) -> CustomConfig:
    """``cfg`` with the settings that the algorithm's `Settings` made. UserError where it does not
    take them."""
    kind = getattr(own, "Settings", None)
    if kind is None:
        if cfg.settings:
            raise UserError(
                f"{purpose} has no Settings, a dataclass or pydantic model, to make "
                f"algo.settings {cfg.settings} of; write one, or set algo.settings={{}}"
            )
        return cfg
    return cfg.model_copy(update={"settings": _settings(kind, purpose, cfg.settings)})


def _settings(kind: Callable[..., Any], own_purpose: str, given: Mapping[str, Any]) -> Any:
    purpose = f"algo.settings for {own_purpose}"
    check_keywords(kind, given, purpose)
    with explained(purpose, "algo.settings"):
        try:
            return kind(**given)
        except ValidationError as error:
            problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise UserError(f"{purpose}: {'; '.join(problems)}; correct algo.settings") from error
