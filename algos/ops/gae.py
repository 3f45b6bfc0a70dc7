"""Generalised advantage estimation: how much better an action was than the policy's mean.

Schulman et al. 2015, https://arxiv.org/abs/1506.02438, equation 16; with importance weights,
V-trace (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, equation 1). Pure functions on
time-major tensors; nothing here carries a gradient or waits for a GPU.
`penstock.algos.ops.vtrace` defines the rows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from penstock.algos.ops.vtrace import accumulate, check_shapes


@torch.no_grad()
def gae(
    values: Tensor,
    rewards: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    alive: Tensor,
    *,
    discount: float,
    gae_lambda: float,
    weights: Tensor | None = None,
) -> Tensor:
    """Returns the advantages of ``T`` steps of ``E`` environments.

    ``A[t] = delta[t] + discount * gae_lambda * w[t+1] * A[t+1]`` within an episode, where
    ``delta[t] = r[t] + discount * V[t+1] - V[t]``. Without weights ``w`` is 1, and this is GAE.
    Advantages plus ``values[:-1]`` are then the targets of the values (`lambda_returns`).

    With truncated importance weights ``w``, ``w * A`` are the errors of V-trace with ``rho = c =
    w``, so that the targets are ``values[:-1] + w * A``, and ``w * A`` also weighs the gradient of
    the log-probability.

    Args:
        values: float32 ``[T + 1, E]``.
        rewards: float32 ``[T, E]``.
        terminated: bool ``[T, E]``. Where both flags are set it wins over ``truncated``.
        truncated: bool ``[T, E]``. Such a row is bootstrapped from the value of its final
            observation, ``values[t+1]``, and so is an unfinished episode at the last row.
        alive: bool ``[T, E]``.
        discount: gamma.
        gae_lambda: lambda.
        weights: float32 ``[T, E]``.

    Returns:
        Float32 ``[T, E]``; 0 on rows that are not alive.
    """
    check_shapes(values, rewards, terminated, truncated, alive)
    v_tm1 = values[:-1]
    v_t = values[1:]
    discount_t = ~terminated * discount
    deltas = torch.addcmul(rewards, discount_t, v_t).sub_(v_tm1).mul_(alive)

    # A carry is the factor of the next row's advantage; 0 where the episode ends.
    carries = discount_t * (alive & ~truncated) * gae_lambda
    if weights is not None:
        carries[:-1] *= weights[1:]
    return accumulate(deltas, carries)


def lambda_returns(
    values: Tensor, batch: Mapping[str, Tensor], *, discount: float, gae_lambda: float
) -> Tensor:
    """Returns the returns that values learn, TD(lambda), float32 ``[T, E]``.

    ``G[t] = r[t] + discount * ((1 - gae_lambda) * V[t+1] + gae_lambda * G[t+1])`` within an
    episode. ``G[t+1]`` is ``V[t+1]`` after the last row and where the episode was truncated, and 0
    where it terminated.

    Args:
        values: V, float32 ``[T + 1, E]``.
        batch: `reward`, `terminated`, `truncated` and `alive`, as for `gae`.
        discount: gamma.
        gae_lambda: lambda.
    """
    advantages = gae(
        values=values,
        rewards=batch["reward"],
        terminated=batch["terminated"],
        truncated=batch["truncated"],
        alive=batch["alive"],
        discount=discount,
        gae_lambda=gae_lambda,
    )
    return advantages + values[:-1]
