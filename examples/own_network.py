"""A network of one's own, for Catch (catch.py): it looks at cells rather than at pixels.

A frame of Catch is 9x9 cells of 5x5 pixels, each cell of one shade. One convolution with a stride
of a cell sees each as a whole, so that this network learns the game several times faster than the
Nature CNN does.

    cd examples && penstock train own_network.yaml

What Penstock asks of such a class stands in penstock/models/own_network.py:

- It is made with the shapes of the arrays in an observation, by name (a game with a single array
  has that as "obs"), the number of outputs that decide an action, and `model.settings`.
- It gets those arrays as float32 [B, *shape], pixels from 0 to 1, and returns either features
  [B, width], to which Penstock adds the algorithm's heads, and with `model.core=lstm` or `gru`
  memory before them; or, with PPO and IMPALA, outputs [B, outputs] and values [B] itself.

What does not fit is told in a sentence before anything is trained.
"""

from __future__ import annotations

from torch import Tensor, nn

CELL = 5  # pixels


class Cells(nn.Module):
    """Features [B, width] of what stands in each cell, and beside which."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], outputs: int, kinds: int = 4, width: int = 128
    ) -> None:
        """``kinds`` of things that a cell may show, told apart by the first layer."""
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
