"""Packages that are imported when they are first needed, and may be missing."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["INSTALL_COMMANDS", "explain_missing", "load_monarch", "load_ray"]

INSTALL_COMMANDS = {
    "ray": "pip install 'meshinfer[ray]'",
    "monarch": "pip install torchmonarch",
}
"""What brings a package, by the name that is imported."""


def load_ray(what: str) -> Any:
    """The module ``ray``, which the user has initialised.

    Raises:
        ImportError: ``what`` needs it and it is not installed; has the command to install it.
        ValueError: it is not initialised in this process; Ray itself would start another cluster.
    """
    ray = _load("ray", what)
    if not ray.is_initialized():
        raise ValueError(
            f"{what} needs Ray, which is not initialised in this process; call ray.init() first"
            " (address='auto' for a cluster that runs)"
        )
    return ray


def load_monarch(what: str) -> Any:
    """The module ``monarch.actor``, with our settings; :class:`ImportError` as :func:`load_ray`."""
    from meshinfer.monarch_settings import apply_monarch_settings

    apply_monarch_settings()
    return _load("monarch.actor", what)


def explain_missing(what: str, error: ModuleNotFoundError) -> ImportError | None:
    """The error to raise where ``what`` cannot do without the module that was not found; ``None`` for another one."""
    package = (error.name or "").partition(".")[0]
    command = INSTALL_COMMANDS.get(package)
    return None if command is None else ImportError(f"{what} needs {package}: {command}")


def _load(name: str, what: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        explained = explain_missing(what, error)
        if explained is None:
            raise
        raise explained from error
