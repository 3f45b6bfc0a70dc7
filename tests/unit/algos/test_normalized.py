"""Normalised values against their definition, where rounding errors would show."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.algos.ops.normalized import normalized


def test_values_far_from_zero_keep_their_differences() -> None:
    """Of 10000 and 10001 mean and deviation are 10000.5 and 0.5."""
    values, mask = torch.tensor([10000.0, 0.0, 10001.0]), torch.tensor([1.0, 0.0, 1.0])
    torch.testing.assert_close(normalized(values, mask), torch.tensor([-1.0, 0.0, 1.0]))


def test_equal_values_become_zero() -> None:
    """Rounding makes the mean of the squares of some less than the square of their mean."""
    for count in range(30, 60):
        for tenths in range(1, 41):
            found = normalized(torch.full((count,), tenths / 10), torch.ones(count))
            assert not found.any(), (count, tenths)


def test_rows_of_other_learners_have_equal_weight() -> None:
    """Own rows are 1 and 3, others 5 and 7: of all four the mean is 4, the variance 5."""

    def add_others(sums: Tensor) -> None:
        sums += torch.tensor([2.0, 5 + 7, 25 + 49], dtype=torch.float64)

    found = normalized(torch.tensor([1.0, 3.0]), torch.ones(2), add_others)
    torch.testing.assert_close(found, torch.tensor([-3.0, -1.0]) / 5**0.5)
