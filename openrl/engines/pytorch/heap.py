"""Keeps freed memory in the process, for the next pass to take.

glibc gives large blocks back to the kernel at once, and a pass of the same size then faults in
every page anew: a tenth of the CPU time of a pass, and more the more jobs share it, since only
their blocks are that large. The process keeps what its largest pass took.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8  # of <malloc.h>
_NEVER = 2**31 - 1
_STEP = 16 << 20


def keep_freed_memory() -> bool:
    """For the whole process; true where the C library can do it (glibc)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One arena: those of other threads cannot hold a block of more than 32 MiB.
    settings = ((_ARENA_MAX, 1), (_MMAP_MAX, 0), (_TRIM_THRESHOLD, _NEVER), (_TOP_PAD, _STEP))
    return all(mallopt(name, value) == 1 for name, value in settings)
