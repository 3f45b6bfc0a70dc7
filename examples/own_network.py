"""A custom network for Catch (catch.py), which processes cells instead of pixels.

A frame of Catch is 9x9 cells of 5x5 pixels, each cell of one shade. One convolution with a stride
of a cell covers each cell exactly, so this network learns the task several times faster than the
Nature CNN.

    cd examples && penstock train own_network.yaml

penstock/models/own_network.py defines the requirements of such a class:

- Its arguments are the shapes of the arrays in an observation, by name (a single array is "obs"),
  the number of outputs that determine an action, and `model.settings`.
- Its input is those arrays as float32 [B, *shape], pixels from 0 to 1. It returns either features
  [B, width], to which Penstock adds the heads of the algorithm, and with `model.core=lstm` or `gru`
  a recurrent core before them; or, with PPO and IMPALA, outputs [B, outputs] and values [B].

A mismatch is reported in one sentence before training begins.
"""

from __future__ import annotations

from torch import Tensor, nn

CELL = 5  # pixels


class Cells(nn.Module):
    """Features [B, width] of the contents of all cells."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], outputs: int, kinds: int = 4, width: int = 128
    ) -> None:
        """``kinds``: number of object kinds that the first layer distinguishes in a cell."""
        super().__init__()
        channels, height, pixels = shapes["obs"]
        self.cells = nn.Conv2d(channels, kinds, CELL, stride=CELL)
        self.layers = nn.Sequential(
            nn.Flatten(),
            nn.Linear(kinds * (height // CELL) * (pixels // CELL), width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
        )

    def forward(self, arrays: dict[str, Tensor]) -> Tensor:
        features: Tensor = self.layers(self.cells(arrays["obs"]).relu())
        return features
