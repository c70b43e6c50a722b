"""``python -m meshinfer``: see :mod:`meshinfer.doctor`."""

from __future__ import annotations

import sys

from meshinfer.doctor.command import main

if __name__ == "__main__":
    sys.exit(main())
