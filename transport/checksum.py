"""CRC-32 by the processor's vector instructions, where the library for them is installed.

python-isal takes 2 us for 125 KB, and zlib 29 us; their sums are the same.
"""

from __future__ import annotations

try:
    from isal.isal_zlib import crc32
except ImportError:  # no wheel for this platform
    from zlib import crc32

__all__ = ["crc32"]
