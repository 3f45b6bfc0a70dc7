"""The batch that `sample` returns: arrays by name, nested like the spaces."""

from __future__ import annotations

from typing import Any


class Batch(dict[str, Any]):
    """A batch of B transitions: a dict whose keys are also attributes.

    ``batch.obs`` is ``batch["obs"]``.

    | key                   | shape and dtype          | meaning                                  |
    | --------------------- | ------------------------ | ---------------------------------------- |
    | obs, next_obs         | [B, *shape], like space  | before, and n rows later                 |
    | action, further ones  | [B, *shape], like space  | as added                                 |
    | reward                | [B] float32              | sum of gamma^j r over n rows             |
    | discount              | [B] float32              | gamma^m, m <= n; 0 where terminated      |
    | terminated, truncated | [B] bool                 | how the last of the rows ended           |
    | weights               | [B] float32              | importance weights                       |
    | keys                  | [B] int64                | for `update_priorities`                  |

    With ``stacked=False``, observations that are frame stacks are returned as ``frames`` [B, K,
    *frame] in place of obs and next_obs: see `unstack`.
    """

    @property
    def keys(self) -> Any:
        """The keys of the rows, in place of the method of dict; ``list(batch)`` has the names."""
        return self["keys"]

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"the batch has {list(self)}, no {name}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __repr__(self) -> str:
        """Dtypes and shapes instead of values: `Batch(obs=float32[32, 4], ...)`."""
        return f"Batch({', '.join(f'{name}={_brief(value)}' for name, value in self.items())})"


def _brief(value: Any) -> str:
    """Returns a nested value as text, with dtypes and shapes instead of arrays."""
    if isinstance(value, dict):
        items = ", ".join(f"{name}: {_brief(child)}" for name, child in value.items())
        return f"{{{items}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_brief, value))})"
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{value.dtype}{list(value.shape)}"
    return repr(value)


def unstack(frames: Any, stack: int) -> tuple[Any, Any]:
    """Split frames into obs and next_obs, ``[B, stack, *frame]`` each, without copying.

    Args:
        frames: ``[B, K, *frame]``, array or tensor, so that each frame goes to a device once. K is
            stack + 1 for one-step transitions, whose stacks overlap, and 2 * stack for n-step ones.
        stack: frames of one observation.

    Returns:
        obs and next_obs, as views of ``frames``.
    """
    return frames[:, :stack], frames[:, -stack:]
