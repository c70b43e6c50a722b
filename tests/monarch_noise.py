"""What monarch prints by itself, and no program of ours can prevent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

BANNER = "Monarch internal logs are being written"
ENDING = "Exception ignored in atexit callback"
CONTEXT = "_init_client_context"


def complaints(lines: Iterable[str]) -> list[str]:
    """Without where monarch logs, and without that it took more than the second which it gives itself to end."""
    return [line for line in _beside_its_end(lines) if BANNER not in line]


def _beside_its_end(lines: Iterable[str]) -> Iterator[str]:
    ending = False
    for line in lines:
        ending = ending or (line.startswith(ENDING) and CONTEXT in line)
        if not ending:
            yield line
        elif line.startswith("TimeoutError"):  # the last line of its traceback
            ending = False
