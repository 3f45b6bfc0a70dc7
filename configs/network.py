"""What must not be said together of the network."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.configs.algorithms import OnPolicyConfig
from penstock.configs.group import Contradiction
from penstock.configs.model import ModelConfig
from penstock.configs.sections import Sections

ACTOR_CRITICS = (
    *("core", "core_size", "critic", "normalize_observations"),
    *("gaussian", "log_std_init", "entry", "settings"),
)


def network(cfg: Sections) -> Iterator[Contradiction]:
    """Of the network with the algorithm and with what computes it."""
    yield from _off_policy(cfg)
    yield from _inference(cfg)
    model = cfg.model
    if model.settings and model.entry is None:
        yield Contradiction(
            ("model.settings", "model.entry"),
            "model.settings are those of a network of your own, and model.entry is null; "
            "set model.entry, or model.settings={}",
        )


def _off_policy(cfg: Sections) -> Iterator[Contradiction]:
    algo, model, defaults = cfg.algo, cfg.model, ModelConfig()
    if isinstance(algo, OnPolicyConfig):
        return
    kinds = ("nature_cnn", "impala_cnn") if algo.name == "sac" else ("impala_cnn",)
    if model.kind in kinds:
        known = "model.kind mlp only" if algo.name == "sac" else "model.kind mlp and nature_cnn"
        yield Contradiction(
            ("algo.name", "model.kind"),
            f"algo.name {algo.name} computes {known}, not {model.kind}; set model.kind="
            f"{'mlp' if algo.name == 'sac' else 'auto'}",
        )
    for key in ACTOR_CRITICS:
        value, default = getattr(model, key), getattr(defaults, key)
        if value != default:
            yield Contradiction(
                (f"model.{key}", "algo.name"),
                f"model.{key} {_shown(value)} is for actor-critics, which algo.name {algo.name} is "
                f"none of; set algo.name=ppo or model.{key}={_shown(default)}",
            )
            return


def _inference(cfg: Sections) -> Iterator[Contradiction]:
    if cfg.actors.inference != "numpy":
        return
    model = cfg.model
    wrong = (
        ("kind", model.kind in ("nature_cnn", "impala_cnn"), "model.kind mlp only"),
        ("core", model.core != "none", "networks without core only"),
        ("critic", model.critic == "shared", "networks with a critic of its own only"),
        ("entry", model.entry is not None, "Penstock's own networks only"),
    )
    for key, is_wrong, known in wrong:
        if is_wrong:
            yield Contradiction(
                ("actors.inference", f"model.{key}"),
                f"actors.inference numpy computes {known}, not {getattr(model, key)}; "
                "set actors.inference=torch",
            )
            return


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return "null" if value is None else str(value)
