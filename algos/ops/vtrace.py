"""V-trace: targets for values, and advantages, from samples of a policy that lags behind.

Espeholt et al. 2018, https://arxiv.org/abs/1802.01561, equation 1, with lambda as in its remark 2.
Pure functions on time-major tensors; nothing here carries a gradient, nothing waits for a GPU.

Row t holds what happened between obs[t] and obs[t+1]: its values are ``v_tm1[t] = V(obs[t])`` and
``v_t[t] = V(obs[t+1])``, the latter also where the row was truncated, since there obs[t+1] is the
final observation. An ended row cuts the trace. A row that is not alive (the reset after an end)
contributes nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor


class VTrace(NamedTuple):
    """Result of V-trace, float32 ``[T, E]``; zero on rows that are not alive."""

    errors: Tensor
    """``vs - V``: how far each value lies below its target."""
    advantages: Tensor
    """``rho (r + discount vs' - V)``: the weight of the gradient of the log-probability."""


@torch.no_grad()
def vtrace(
    values: Tensor,
    rewards: Tensor,
    log_rhos: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    alive: Tensor,
    *,
    discount: float,
    trace_lambda: float = 1.0,
    rho_clip: float = 1.0,
    c_clip: float = 1.0,
) -> VTrace:
    """Returns errors of values and advantages of ``T`` steps of ``E`` environments.

    An episode that does not end in the rows is bootstrapped from the last of ``values``.

    Args:
        values: float32 ``[T + 1, E]``.
        rewards: float32 ``[T, E]``.
        log_rhos: float32 ``[T, E]``, logarithm of the learner's probability of the action over the
            actor's.
        terminated: bool ``[T, E]``. Where both flags are set it wins over ``truncated``.
        truncated: bool ``[T, E]``.
        alive: bool ``[T, E]``.
        discount: gamma.
        trace_lambda: lambda of the paper's remark 2.
        rho_clip: rho-bar, the upper bound on the weights of temporal differences.
        c_clip: c-bar, the upper bound on the weights that carry later differences back.
    """
    check_shapes(values, rewards, log_rhos, terminated, truncated, alive)
    v_tm1 = values[:-1]
    v_t = values[1:]
    rhos = log_rhos.exp()
    clipped_rhos = rhos.clamp(max=rho_clip) * alive
    discount_t = ~terminated * discount
    continuing_discount_t = discount_t * (alive & ~truncated)  # 0 where the episode ends

    # Errors: vs[t] - V[t] = delta[t] + discount * lambda * c[t] * (vs[t+1] - V[t+1]).
    deltas = torch.addcmul(rewards, discount_t, v_t).sub_(v_tm1).mul_(clipped_rhos)
    carries = rhos.clamp_(max=c_clip).mul_(continuing_discount_t).mul_(trace_lambda)
    errors = accumulate(deltas.clone(), carries)

    # Advantages: rho[t] * (r[t] + discount * vs[t+1] - V[t]), the delta with vs[t+1] for V[t+1].
    factors = continuing_discount_t.mul_(clipped_rhos)
    advantages = deltas
    advantages[:-1].addcmul_(factors[:-1], errors[1:])
    return VTrace(errors, advantages)


def accumulate(deltas: Tensor, carries: Tensor) -> Tensor:
    """Returns ``errors[t] = deltas[t] + carries[t] * errors[t+1]``; overwrites both arguments.

    Each pass doubles the number of rows that an error is the sum of (Hillis & Steele 1986), so that
    there are log2(T) passes instead of T calls on single rows.
    """
    # numpy's calls take a quarter of the time of torch's on a CPU, and give the same numbers.
    on_cpu = deltas.device.type == "cpu"
    errors: Any = deltas.numpy() if on_cpu else deltas
    factors: Any = carries.numpy() if on_cpu else carries

    # Each error is the sum of `reach` rows so far, and each factor the product of as many carries.
    reach = 1
    with np.errstate(all="ignore"):  # numbers that are not finite are reported elsewhere
        while reach < len(deltas):
            carried = factors[:-reach]
            errors[:-reach] += carried * errors[reach:]
            carried[:] = carried * factors[reach:]
            reach *= 2
    return deltas


def check_shapes(values: Tensor, *columns: Tensor) -> None:
    """Assert that ``values`` is ``[T + 1, E]``, the others ``[T, E]``, and the last three bool."""
    steps = values.shape[0] - 1
    envs = values.shape[1]
    shapes = [tuple(tensor.shape) for tensor in columns]
    flags = columns[-3:]

    assert steps >= 1, tuple(values.shape)
    assert all(shape == (steps, envs) for shape in shapes), (tuple(values.shape), shapes)
    assert all(flag.dtype == torch.bool for flag in flags), [flag.dtype for flag in flags]
