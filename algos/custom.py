"""An algorithm of one's own: the functions of a module, or of an object or class in one.

It trains on fresh unrolls, as `penstock.algos.impala` and `penstock.algos.ppo` do, and has what
those modules have:

    STATISTICS    names of the sums that `loss` returns
    loss          (net, batch, cfg, envs, add_others) -> loss, sums

and, if it wants,

    Settings      a dataclass or pydantic model of the options in ``algo.settings``
    columns, check, process    what actors record; those of IMPALA by default
    prepare       (net, batch, cfg, parts, add_others) -> more columns, once for each batch
    going_on      (net, batch, cfg, parts, add_others) -> bool, between epochs
    whole         (cfg) -> bool: whether `loss` must see all environments of an update at once;
                  only then may it call ``add_others``

``cfg`` is `CustomConfig`, whose ``settings`` are those that its `Settings` made. Actors import the
module too: one that imports torch within its functions lets them start faster.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from pydantic import ValidationError

from penstock.algos import impala, slots
from penstock.algos.base import Columns, UnrollAlgorithm
from penstock.configs.algorithms import CustomConfig
from penstock.configs.errors import UserError
from penstock.envs.loading import check_keywords, explained, import_module, load

NEEDED = ("STATISTICS", "loss")
OPTIONAL = ("prepare", "going_on", "whole")


@cache
def custom(entry: str) -> UnrollAlgorithm[CustomConfig]:
    """The algorithm of ``algo.entry``, loaded once: its functions, filled up by those of IMPALA.
    UserError where it has too few."""
    purpose = f"algo.entry {entry}"
    module, _, name = entry.partition(":")
    own: Any = load(entry, purpose) if name else import_module(module, purpose)
    if name:
        with explained(purpose, "algo.entry"):
            own = own()
    if missing := [name for name in NEEDED if not hasattr(own, name)]:
        raise UserError(
            f"{purpose} has no {' and no '.join(missing)}; an algorithm has "
            f"{' and '.join(NEEDED)}, as penstock/algos/ppo.py and examples/own_algorithm.py do"
        )

    def settled(cfg: CustomConfig) -> CustomConfig:
        return _settled(own, purpose, cfg)

    def process(cfg: CustomConfig, columns: Columns) -> None:
        if hasattr(own, "process"):
            own.process(settled(cfg), columns)
        else:
            slots.adjust_rewards(cfg, columns["reward"])

    return UnrollAlgorithm(
        tuple(own.STATISTICS),
        getattr(own, "columns", impala.columns),
        getattr(own, "check", impala.check),
        process,
        own.loss,
        settled=settled,
        **{name: getattr(own, name) for name in OPTIONAL if hasattr(own, name)},
    )


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
            said = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
            raise UserError(f"{purpose}: {'; '.join(said)}; correct algo.settings") from error
