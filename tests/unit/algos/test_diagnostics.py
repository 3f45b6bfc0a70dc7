"""Figures of a batch, computed from sums over its samples, against numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.algos.diagnostics import FIGURES, LAG, MOMENTS, batch_sums, figures

RHO_CLIP = 1.5


def test_figures_are_those_of_the_samples() -> None:
    """With targets far from 0, whose variance would be lost in single precision."""
    rng = np.random.default_rng(0)
    mask = rng.random(400) < 0.8
    log_rhos = rng.normal(0, 0.5, 400)
    advantages, errors = rng.normal(size=(2, 400))
    targets = 1000 + errors + rng.normal(0, 2, 400)
    columns = [torch.from_numpy(c).float() for c in (mask, log_rhos, advantages, errors, targets)]
    sums = batch_sums(*columns, rho_clip=RHO_CLIP)
    parts = [
        batch_sums(*(c[some] for c in columns), rho_clip=RHO_CLIP)
        for some in (slice(0, 150), slice(150, 400))
    ]
    torch.testing.assert_close(sums, parts[0] + parts[1])
    means = dict(zip((*MOMENTS, *LAG), (sums / mask.sum()).tolist(), strict=True))
    found = figures({"entropy": 0.5, **means})

    rows = [c.double().numpy()[mask] for c in columns[1:]]
    log_rhos, advantages, errors, targets = rows
    rhos = np.exp(log_rhos)
    weights = np.minimum(rhos, RHO_CLIP)
    expected = {
        "entropy": 0.5,
        "kl": np.mean(rhos - 1 - log_rhos),
        "rho": np.mean(rhos),
        "rho_clipped": np.mean(rhos > 1.02 * RHO_CLIP),  # more than rounding adds
        "effective_sample_share": weights.sum() ** 2 / (mask.sum() * (weights**2).sum()),
        "explained_variance": 1 - np.var(errors) / np.var(targets),
        "advantage_mean": np.mean(advantages),
        "advantage_std": np.std(advantages),
        "value_target_mean": np.mean(targets),
        "value_target_std": np.std(targets),
    }
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert set(FIGURES) <= found.keys()
    assert not set(MOMENTS) & found.keys()


@pytest.mark.parametrize("log_rho", [200.0, -200.0])
def test_a_ratio_beyond_all_bounds_leaves_the_sums_finite(log_rho: float) -> None:
    ones = torch.ones(3)
    log_rhos = torch.tensor([0.0, log_rho, 0.0])
    sums = batch_sums(ones, log_rhos, ones, ones, ones, rho_clip=RHO_CLIP)
    assert sums.isfinite().all()
    found = dict(zip((*MOMENTS, *LAG), sums.tolist(), strict=True))
    assert found["weight"] == pytest.approx(2 + (RHO_CLIP if log_rho > 0 else 0))
    assert found["rho_clipped"] == (log_rho > 0)


def test_constant_targets_have_no_explained_variance() -> None:
    ones = torch.ones(5)
    sums = batch_sums(ones, 0 * ones, ones, ones, 3 * ones, rho_clip=1.0)
    found = figures(dict(zip((*MOMENTS, *LAG), (sums / 5).tolist(), strict=True)))
    assert "explained_variance" not in found
    assert found["effective_sample_share"] == pytest.approx(1)
    assert found["value_target_std"] == 0


def test_other_statistics_are_passed_through() -> None:
    assert figures({"advantage": 1.0, "weight": 2.0}) == {"advantage": 1.0, "weight": 2.0}
