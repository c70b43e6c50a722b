"""A newer NCCL for a machine that has an old one and reaches nothing: a wheel that came in pieces."""

from __future__ import annotations

import re
import shutil
import zipfile
from pathlib import Path

_PIECE = re.compile(r"part-(\d+)$")
_LIBRARY = "libnccl.so.2"


def join_pieces(folder: Path, target: Path) -> Path:
    """Join `part-00`, `part-01`, ... of `folder` into the wheel `target`.

    Raises:
        ValueError: there are none, one is missing, or together they are no whole wheel.
    """
    found = {int(m[1]): path for path in folder.glob("part-*") if (m := _PIECE.match(path.name))}
    if not found:
        raise ValueError(f"{folder} has no part-00, part-01, ...; make them with split -d -b 52M")
    missing = sorted(set(range(max(found) + 1)) - found.keys())
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(f'part-{number:02}' for number in missing)}")
    with target.open("wb") as whole:
        for _, path in sorted(found.items()):
            with path.open("rb") as piece:
                shutil.copyfileobj(piece, whole)
    if not zipfile.is_zipfile(target):
        raise ValueError(
            f"the {len(found)} pieces in {folder} are no whole wheel; is the last one missing?"
        )
    return target


def unpack_library(wheel: Path, folder: Path) -> Path:
    """Unpack `libnccl.so.2` of a wheel into `folder`; ValueError if it has none or is damaged."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.rpartition("/")[2] == _LIBRARY]
        if not names:
            raise ValueError(f"the wheel has no {_LIBRARY}; is it one of nvidia-nccl-cu13?")
        library = folder / _LIBRARY
        try:
            with archive.open(names[0]) as source, library.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except (zipfile.BadZipFile, EOFError) as error:
            raise ValueError(f"the wheel is damaged: {error}; split and copy it again") from error
    library.chmod(0o755)
    return library


def library_from_pieces(folder: Path, scratch: Path) -> Path:
    """Both; `scratch` keeps the library alone."""
    wheel = join_pieces(folder, scratch / "nccl.whl")
    library = unpack_library(wheel, scratch)
    wheel.unlink()
    return library
