"""The learning rate: scaled by the number of learners, warmed up, falling by agent steps."""

from __future__ import annotations

from math import sqrt

from penstock.configs.sections import LearnerConfig


def learning_rate(cfg: LearnerConfig, env_steps: int, update: int) -> float:
    """The rate of optimizer step ``update`` (from 1), taken after ``env_steps`` agent steps.

    ``lr`` is multiplied by what `lr_scaling` says for ``count`` learners: linear after Goyal et al.
    2017 (arXiv 1706.02677), the root after Krizhevsky 2014 (arXiv 1404.5997). Step
    ``lr_warmup_updates`` is the first with all of that; those before it rise linearly, from the
    unscaled ``lr`` as in Goyal et al. §2.2, or from 0 where nothing is scaled. All of it falls
    linearly, to its ``lr_end_fraction`` after ``lr_decay_steps`` agent steps, and stays.
    """
    peak = cfg.lr * scaling(cfg)
    first = cfg.lr if peak > cfg.lr else 0.0
    warm = min(update / cfg.lr_warmup_updates, 1.0) if cfg.lr_warmup_updates else 1.0
    done = min(env_steps / cfg.lr_decay_steps, 1.0) if cfg.lr_decay_steps else 0.0
    return (first + (peak - first) * warm) * (1 - done * (1 - cfg.lr_end_fraction))


def scaling(cfg: LearnerConfig) -> float:
    """What the learning rate of one learner is multiplied by for ``count`` of them."""
    return {"none": 1.0, "sqrt": sqrt(cfg.count), "linear": float(cfg.count)}[cfg.lr_scaling]
