"""Generalised advantage estimation: how much better an action was than the policy's mean.

Schulman et al. 2015, https://arxiv.org/abs/1506.02438, equation 16; with importance weights,
V-trace (Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, equation 1). Pure functions on
time-major tensors; nothing here carries a gradient or waits for a GPU.
`penstock.algos.ops.vtrace` defines the rows.
"""

from __future__ import annotations

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
    """Advantages of ``T`` steps of ``E`` environments, ``[T, E]``; 0 on rows that are not alive.

    ``values`` float32 ``[T+1, E]``; the others ``[T, E]``: ``rewards`` float32, the flags bool.
    Where both flags are set ``terminated`` wins; a truncated row is bootstrapped from the value of
    its final observation, ``values[t+1]``, and so is an unfinished episode at the last row.
    Advantages plus ``values[:-1]`` are the targets of the values, TD(lambda).

    With truncated importance weights ``w`` ``[T, E]``, ``A[t] = delta[t] + discount * gae_lambda *
    w[t+1] * A[t+1]``. ``w * A`` are then the errors of V-trace with ``rho = c = w``, so that the
    targets are ``values[:-1] + w * A``, and ``w * A`` also weighs the gradient of the
    log-probability. Equal weights of 1 give GAE.
    """
    check_shapes(values, rewards, terminated, truncated, alive)
    v_tm1, v_t = values[:-1], values[1:]
    discount_t = ~terminated * discount
    carries = discount_t * (alive & ~truncated) * gae_lambda  # into the next row of the episode
    if weights is not None:
        carries[:-1] *= weights[1:]
    deltas = torch.addcmul(rewards, discount_t, v_t).sub_(v_tm1).mul_(alive)
    return accumulate(deltas, carries)
