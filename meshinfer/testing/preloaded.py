"""Imported by multiprocessing's fork server, so that the processes that it forks have everything they need."""

import gc

import meshinfer.testing  # noqa: F401

gc.freeze()  # collections in those processes need not look at what was imported
