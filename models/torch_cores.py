"""Memory in torch: LSTM and GRU over unrolls in which episodes end and begin.

The state of an environment is one vector, of an LSTM its output h and then its cell c. It may be
forgotten before any row, which torch.nn.LSTM and torch.nn.GRU cannot do; the equations are theirs.

Products with the inputs are computed for all rows at once, those with the state row by row. The
gradient is written out: for few environments a gradient that autograd records operation by
operation takes 1.7 times as long.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

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

    def __init__(self, inputs: int, size: int, *, gates: int, vectors: int) -> None:
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
        state_mask = (~first).to(features.dtype)[..., None]
        return self.rows(self.input(features), state, state_mask)

    @abstractmethod
    def rows(self, products: Tensor, state: Tensor, state_mask: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what `forward` does, given the products of the inputs.

        Args:
            products: of the inputs and their weights, with biases, ``[T, E, gates * size]``.
            state: ``[E, state_size]``, before the first row.
            state_mask: ``[T, E, 1]``, 0 where the state is forgotten before a row, else 1.
        """


class Lstm(Core):
    """Hochreiter and Schmidhuber 1997, with forget gates that begin open (bias 1)."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__(inputs, size, gates=4, vectors=2)
        forget_bias = self.input.bias.detach()[size : 2 * size]
        nn.init.constant_(forget_bias, 1.0)

    def rows(self, products: Tensor, state: Tensor, state_mask: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = _LstmRows.apply(  # type: ignore[no-untyped-call]
            products + self.recurrent.bias, self.recurrent.weight, state, state_mask
        )
        return result


class Gru(Core):
    """Cho et al. 2014, arXiv 1406.1078; the reset gate after the product, as in cuDNN."""

    def __init__(self, inputs: int, size: int) -> None:
        super().__init__(inputs, size, gates=3, vectors=1)

    def rows(self, products: Tensor, state: Tensor, state_mask: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = _GruRows.apply(  # type: ignore[no-untyped-call]
            products, self.recurrent.weight, self.recurrent.bias, state, state_mask
        )
        return result


def make_core(kind: Literal["lstm", "gru"], inputs: int, size: int) -> Core:
    """Makes the memory of `model.core` over features of width ``inputs``."""
    return Lstm(inputs, size) if kind == "lstm" else Gru(inputs, size)


class _LstmRows(torch.autograd.Function):
    """The rows of an LSTM, one after the other.

    Gates lie in torch's order: input gate i, forget gate f, candidate g, output gate o. Then
    ``c[t] = f * c[t-1] + i * g`` and ``h[t] = o * tanh(c[t])``.
    """

    @staticmethod
    def forward(
        ctx: Any, products: Tensor, weight: Tensor, state: Tensor, state_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, envs = products.shape[:2]
        size = weight.shape[1]

        # What the backward pass needs of each row: the gates, and the state before it, masked.
        gates = torch.empty_like(products)
        buffers = products.new_empty(4, rows, envs, size)
        previous_outputs, previous_cells, tanhs, outputs = buffers.unbind()

        output, cell = state.split(size, 1)
        weight_t = weight.t()
        for t in range(rows):
            torch.mul(output, state_mask[t], out=previous_outputs[t])
            torch.mul(cell, state_mask[t], out=previous_cells[t])

            gate = torch.addmm(products[t], previous_outputs[t], weight_t, out=gates[t])
            gate[:, : 2 * size].sigmoid_()
            gate[:, 2 * size : 3 * size].tanh_()
            gate[:, 3 * size :].sigmoid_()
            i, f, g, o = gate.split(size, 1)

            cell = torch.addcmul(f * previous_cells[t], i, g)
            torch.tanh(cell, out=tanhs[t])
            output = torch.mul(o, tanhs[t], out=outputs[t])

        ctx.save_for_backward(weight, gates, previous_outputs, previous_cells, tanhs, state_mask)
        return outputs, torch.cat((output, cell), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        weight, gates, previous_outputs, previous_cells, tanhs, state_mask = ctx.saved_tensors
        rows, envs, size = previous_outputs.shape

        # Derivatives for all rows at once: `cell_slopes` of the cell by the products of i, f and g,
        # `output_slopes` of the output by the product of o, and `carry` of the cell by the cell
        # before it.
        i, f, g, o = gates.split(size, 2)
        cell_slopes = torch.cat((i - i**2, f - f**2, 1 - g**2), 2)
        cell_slopes *= torch.cat((g, previous_cells, i), 2)
        cell_slopes = cell_slopes.view(rows, envs, 3, size)
        output_slopes = tanhs * (o - o**2)
        d_cell_by_output = o * (1 - tanhs**2)
        carry = f * state_mask

        d_products = torch.empty_like(gates)
        d_output, d_cell = d_state.split(size, 1)
        for t in range(rows - 1, -1, -1):
            d_output = d_output + d_outputs[t]
            d_cell = torch.addcmul(d_cell, d_output, d_cell_by_output[t])

            d_row = d_products[t]
            d_cell_gates = d_row[:, : 3 * size].unflatten(1, (3, size))
            torch.mul(cell_slopes[t], d_cell[:, None], out=d_cell_gates)
            torch.mul(d_output, output_slopes[t], out=d_row[:, 3 * size :])

            d_output = torch.mm(d_row, weight) * state_mask[t]
            d_cell = d_cell * carry[t]

        d_weight = d_products.flatten(0, 1).t() @ previous_outputs.flatten(0, 1)
        return d_products, d_weight, torch.cat((d_output, d_cell), 1), None


class _GruRows(torch.autograd.Function):
    """The rows of a GRU, one after the other.

    Gates lie in torch's order: reset gate r, update gate z, candidate n. With the products p of the
    state, ``n = tanh(x_n + r * p_n)`` and ``h[t] = (1 - z) * n + z * h[t-1]``.
    """

    @staticmethod
    def forward(
        ctx: Any, products: Tensor, weight: Tensor, bias: Tensor, state: Tensor, state_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        rows, envs = products.shape[:2]
        size = weight.shape[1]

        # What the backward pass needs of each row: the gates, the masked output before it, p_n.
        gates = torch.empty_like(products)
        buffers = products.new_empty(3, rows, envs, size)
        previous_outputs, candidate_products, outputs = buffers.unbind()

        output = state
        weight_t = weight.t()
        for t in range(rows):
            torch.mul(output, state_mask[t], out=previous_outputs[t])
            state_products = torch.addmm(bias, previous_outputs[t], weight_t)
            candidate_products[t] = state_products[:, 2 * size :]

            r_and_z = gates[t, :, : 2 * size]
            torch.add(
                products[t, :, : 2 * size], state_products[:, : 2 * size], out=r_and_z
            ).sigmoid_()
            r, z = r_and_z.split(size, 1)

            n = gates[t, :, 2 * size :]
            torch.addcmul(products[t, :, 2 * size :], r, candidate_products[t], out=n).tanh_()
            output = torch.lerp(n, previous_outputs[t], z, out=outputs[t])

        ctx.save_for_backward(weight, gates, previous_outputs, candidate_products, state_mask)
        return outputs, output.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_outputs: Tensor, d_state: Tensor) -> tuple[Tensor | None, ...]:
        weight, gates, previous_outputs, candidate_products, state_mask = ctx.saved_tensors
        rows, _, size = previous_outputs.shape

        # Derivatives of the output for all rows at once: `slopes` by the products of the state, and
        # `carry` by the output before it.
        r, z, n = gates.split(size, 2)
        slope_by_n = (1 - z) * (1 - n**2)
        slope_by_z = (previous_outputs - n) * (z - z**2)
        slope_by_r = slope_by_n * candidate_products * (r - r**2)
        slopes = torch.cat((slope_by_r, slope_by_z, slope_by_n * r), 2)
        slopes = slopes.unflatten(2, (3, size))
        carry = z * state_mask

        d_state_products = torch.empty_like(gates)
        d_all_outputs = torch.empty_like(previous_outputs)
        d_output = d_state
        for t in range(rows - 1, -1, -1):
            d_row = torch.add(d_output, d_outputs[t], out=d_all_outputs[t])
            d_gates = d_state_products[t].unflatten(1, (3, size))
            torch.mul(slopes[t], d_row[:, None], out=d_gates)

            d_by_products = torch.mm(d_state_products[t], weight) * state_mask[t]
            d_output = torch.addcmul(d_by_products, d_row, carry[t])

        flat_products = d_state_products.flatten(0, 1)
        d_weight = flat_products.t() @ previous_outputs.flatten(0, 1)
        d_bias = flat_products.sum(0)

        # The candidate's product of the inputs, unlike that of the state, is not multiplied by r.
        d_products = torch.cat((d_state_products[..., : 2 * size], d_all_outputs * slope_by_n), 2)
        return d_products, d_weight, d_bias, d_output, None
