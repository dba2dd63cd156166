"""Tunes the C library's allocator for large messages."""

import ctypes


def tune_allocator() -> None:
    """Keeps freed message buffers in the process instead of returning them to the system page by page.

    This doubles the transfer rate; otherwise every message is mapped and page-faulted again. Call it at the entry point
    of a process; it does nothing if the C library is not glibc. Threads keep their own arenas: a single arena would
    save 20 MiB per node, but cost a fifth of the rate of snapshots (473 to 381 MiB/s, medians of ten alternating runs).
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "gnu_get_libc_version"):
        mmap_threshold, trim_threshold = -3, -1
        libc.mallopt(mmap_threshold, 256 << 20)
        libc.mallopt(trim_threshold, (2 << 30) - 1)


def give_back_freed() -> None:
    """Returns all freed memory to the system, which can be gigabytes after a flood.

    Call it in a thread, because it may take a second. Does nothing if the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
