"""The one place for the version: the build, ``meshinfer.__version__`` and the handshake read it."""

__version__ = "0.1.0"
