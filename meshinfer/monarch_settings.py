"""The settings of monarch that meshinfer relies on: how soon a dead process or host is noticed."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["MONARCH_SETTINGS", "apply_monarch_settings"]

MONARCH_SETTINGS: Mapping[str, str] = MappingProxyType(
    {
        # How often processes are asked whether they live; monarch's default is 10 s.
        "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "500ms",
        # How long an answer may take (30 s). A process that dies while it is being asked is noticed only then. Much
        # shorter, and one that imports torch on a busy machine is taken for dead.
        "HYPERACTOR_MESH_GET_ACTOR_STATE_MAX_IDLE": "15s",
        "HYPERACTOR_MESH_GET_PROC_STATE_MAX_IDLE": "15s",
        # How long a host may be unreachable before what is on it counts as lost (60 s).
        "HYPERACTOR_CHANNEL_RECONNECT_TIMEOUT": "10s",
    }
)
"""Environment variables of monarch, and the values that :func:`apply_monarch_settings` gives those that are not set."""


def apply_monarch_settings() -> None:
    """Set those of :data:`MONARCH_SETTINGS` that the user has not, for this process and those that it starts.

    Best before monarch is imported; where it is already, monarch is made to read its environment again. Hosts that
    were started beforehand have the settings of their own environment.
    """
    missing = {name: value for name, value in MONARCH_SETTINGS.items() if name not in os.environ}
    if not missing:
        return
    os.environ.update(missing)
    config = sys.modules.get("monarch._rust_bindings.monarch_hyperactor.config")
    if config is not None:
        config.reload_config_from_env()
