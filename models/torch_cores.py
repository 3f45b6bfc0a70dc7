"""Memory in torch: LSTM and GRU over unrolls in which episodes end and begin.

The state of an environment is one vector, of an LSTM its output h and then its cell c. It may be
forgotten before any row, which torch.nn.LSTM and torch.nn.GRU cannot do; the equations are theirs.

Products with the inputs are computed for all rows at once, those with the state row by row. The
gradient is written out: for few environments a gradient that autograd records operation by
operation takes 1.7 times as long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class Core(nn.Module, ABC):
    """A recurrent layer, whose gates are computed of the input and of the previous output.

    Args:
        inputs: width of the features.
        size: width of the outputs.
        gates: number of gates, each of ``size`` values.
        vectors: number of vectors of ``size`` values in a state.
    """

    def __init__(self, inputs: int, size: int, gates: int, vectors: int) -> None:
        super().__init__()
        self.size = size
        self.state_size = vectors * size
        self.input = nn.Linear(inputs, gates * size)
        self.recurrent = nn.Linear(size, gates * size)
        for layer in (self.input, self.recurrent):
            for gate in layer.weight.detach().chunk(gates):
                nn.init.orthogonal_(gate)
            nn.init.zeros_(layer.bias)

    def forward(self, features: Tensor, state: Tensor, first: Tensor) -> tuple[Tensor, Tensor]:
        """Returns outputs ``[T, E, size]``, and the state after the last row.

        Args:
            features: ``[T, E, inputs]``.
            state: ``[E, state_size]``, before the first row.
            first: bool ``[T, E]``; the state is 0 before each row where it is true.
        """
        kept = (~first).to(features.dtype)[..., None]
        return self.rows(self.input(features), state, kept)

    @abstractmethod
    def rows(self, given: Tensor, state: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """As `forward`, by the inputs' products ``[T, E, gates * size]`` and the share of the state
        that is kept before each row, ``[T, E, 1]``."""


class Lstm(Core):
    """Hochreiter and Schmidhuber 1997, with forget gates that begin open (bias 1)."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__(inputs, size, 4, 2)
        nn.init.constant_(self.input.bias.detach()[size : 2 * size], 1.0)

    def rows(self, given: Tensor, state: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _LstmRows.apply(  # type: ignore[no-untyped-call]
            given + self.recurrent.bias, self.recurrent.weight, state, kept
        )
        return found


class Gru(Core):
    """Cho et al. 2014, arXiv 1406.1078; the reset gate after the product, as in cuDNN."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__(inputs, size, 3, 1)

    def rows(self, given: Tensor, state: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = _GruRows.apply(  # type: ignore[no-untyped-call]
            given, self.recurrent.weight, self.recurrent.bias, state, kept
        )
        return found


def make_core(kind: str, inputs: int, size: int) -> Core | None:
    """Makes the memory of `model.core` over features of width ``inputs``; None for kind `none`."""
    match kind:
        case "lstm":
            return Lstm(inputs, size)
        case "gru":
            return Gru(inputs, size)
    return None


class _LstmRows(torch.autograd.Function):
    """The rows of an LSTM, one after the other.

    Gates lie in torch's order: input gate i, forget gate f, candidate g, output gate o. Then
    ``c[t] = f * c[t-1] + i * g`` and ``h[t] = o * tanh(c[t])``.
    """

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, state: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, envs, size = given.shape[0], given.shape[1], weight.shape[1]
        gates = torch.empty_like(given)
        before, cells, tanhs, outputs = given.new_empty(4, rows, envs, size).unbind()
        output, cell = state.split(size, 1)
        across = weight.t()
        for t in range(rows):
            torch.mul(output, kept[t], out=before[t])
            torch.mul(cell, kept[t], out=cells[t])
            gate = torch.addmm(given[t], before[t], across, out=gates[t])
            gate[:, : 2 * size].sigmoid_()
            gate[:, 2 * size : 3 * size].tanh_()
            gate[:, 3 * size :].sigmoid_()
            enter, keep, new, show = gate.split(size, 1)
            cell = torch.addcmul(keep * cells[t], enter, new)
            torch.tanh(cell, out=tanhs[t])
            output = torch.mul(show, tanhs[t], out=outputs[t])
        ctx.save_for_backward(weight, gates, before, cells, tanhs, kept)
        return outputs, torch.cat((output, cell), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        weight, gates, before, cells, tanhs, kept = ctx.saved_tensors
        rows, envs, size = before.shape
        enter, keep, new, show = gates.split(size, 2)
        slopes = torch.cat((enter - enter**2, keep - keep**2, 1 - new**2), 2)
        slopes *= torch.cat((new, cells, enter), 2)  # of the cell by its gates
        slopes = slopes.view(rows, envs, 3, size)
        d_show, d_cell_by_output = tanhs * (show - show**2), show * (1 - tanhs**2)
        carry = keep * kept
        d_gates = torch.empty_like(gates)
        d_output, d_cell = d_state.split(size, 1)
        for t in range(rows - 1, -1, -1):
            d_output = d_output + d_outputs[t]
            d_cell = torch.addcmul(d_cell, d_output, d_cell_by_output[t])
            d_gate = d_gates[t]
            torch.mul(slopes[t], d_cell[:, None], out=d_gate[:, : 3 * size].unflatten(1, (3, size)))
            torch.mul(d_output, d_show[t], out=d_gate[:, 3 * size :])
            d_output = torch.mm(d_gate, weight) * kept[t]
            d_cell = d_cell * carry[t]
        d_weight = d_gates.flatten(0, 1).t() @ before.flatten(0, 1)
        return d_gates, d_weight, torch.cat((d_output, d_cell), 1), None


class _GruRows(torch.autograd.Function):
    """The rows of a GRU, one after the other.

    Gates lie in torch's order: reset gate r, update gate z, candidate n. With the products p of the
    state, ``n = tanh(x_n + r * p_n)`` and ``h[t] = (1 - z) * n + z * h[t-1]``.
    """

    @staticmethod
    def forward(
        ctx: Any, given: Tensor, weight: Tensor, bias: Tensor, state: Tensor, kept: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, envs, size = given.shape[0], given.shape[1], weight.shape[1]
        gates = torch.empty_like(given)
        before, products, outputs = given.new_empty(3, rows, envs, size).unbind()
        output, across = state, weight.t()
        for t in range(rows):
            torch.mul(output, kept[t], out=before[t])
            mine = torch.addmm(bias, before[t], across)
            products[t] = mine[:, 2 * size :]
            pair = gates[t, :, : 2 * size]
            torch.add(given[t, :, : 2 * size], mine[:, : 2 * size], out=pair).sigmoid_()
            reset, keep = pair.split(size, 1)
            new = gates[t, :, 2 * size :]
            torch.addcmul(given[t, :, 2 * size :], reset, products[t], out=new).tanh_()
            output = torch.lerp(new, before[t], keep, out=outputs[t])
        ctx.save_for_backward(weight, gates, before, products, kept)
        return outputs, output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        weight, gates, before, products, kept = ctx.saved_tensors
        size = before.shape[2]
        reset, keep, new = gates.split(size, 2)
        by_new = (1 - keep) * (1 - new**2)
        by_keep = (before - new) * (keep - keep**2)
        by_reset = by_new * products * (reset - reset**2)
        slopes = torch.cat((by_reset, by_keep, by_new * reset), 2)
        slopes = slopes.unflatten(2, (3, size))
        carry = keep * kept
        d_mine = torch.empty_like(gates)
        d_all = torch.empty_like(before)  # gradient of each output
        d_output = d_state
        for t in range(len(before) - 1, -1, -1):
            d_here = torch.add(d_output, d_outputs[t], out=d_all[t])
            torch.mul(slopes[t], d_here[:, None], out=d_mine[t].unflatten(1, (3, size)))
            d_output = torch.addcmul(torch.mm(d_mine[t], weight) * kept[t], d_here, carry[t])
        rows = d_mine.flatten(0, 1)
        d_weight, d_bias = rows.t() @ before.flatten(0, 1), rows.sum(0)
        d_given = torch.cat((d_mine[..., : 2 * size], d_all * by_new), 2)
        return d_given, d_weight, d_bias, d_output, None
