"""The seams of Penstock: every Protocol that an extension implements, with the order of the calls.

An implementation lives in the room named below and is registered there in one place; a contract
test runs over all implementations of a seam. torch is imported here for types alone.

| seam | implemented in | registered in |
|---|---|---|
"""

from __future__ import annotations
