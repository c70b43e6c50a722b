"""Stands in for Ray's ``setup_worker.py``: has the worker forked, see ``stand_in.py``."""

import runpy
import sys
from pathlib import Path

NOT_FOR_THE_WORKER = ("--serialized-runtime-env-context=", "--language=")

sys.argv[1:] = [word for word in sys.argv[1:] if not word.startswith(NOT_FOR_THE_WORKER)]
runpy.run_path(str(Path(__file__).with_name("stand_in.py")), run_name="__main__")
