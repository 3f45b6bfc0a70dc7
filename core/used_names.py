"""The names of code and files that runs of this user have used on this host.

A run folder that came from elsewhere looks like one of this user's own, and its config could name
any code. So a run notes the references of its config (`configs.code_references`) in the cache
folder of the user, outside the run folder. Whatever reads a run folder later to make what it names
takes only those, and what its caller allows.

Each reference is an empty file, named by the digest of its text: no file is parsed, and processes
may add some at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.configs.code_references import (
    Reference,
    not_allowed,
    references_in_training,
    refusal,
)
from penstock.configs.schema import Config
from penstock.core.user_cache import cache_folder, digest

FOLDER = "used-names"


def note(config: Config) -> None:
    """Note that a run of this user uses the code and files that ``config`` names.

    Without a writable cache folder nothing is noted.
    """
    for _, text in references_in_training(config):
        with suppress(OSError):
            if path := _path(text):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.touch(0o600)


def check(
    references: Sequence[Reference], allow: Sequence[str], source: str, way: str = ""
) -> None:
    """Check that a run folder names only what its reader may load.

    Args:
        references: the code and files that the run folder names.
        allow: patterns of references that the caller allows.
        source: the run folder, for the message.
        way: as of `refusal`.

    Raises:
        UserError: for the first reference that no run of this user has used and no pattern matches.
    """
    for reference in not_allowed(references, allow):
        if not _is_noted(reference.text):
            why = "which no run of yours has used on this host"
            raise refusal(source, reference, why, way)


def _is_noted(text: str) -> bool:
    """Returns whether a run of this user has noted the reference ``text``."""
    path = _path(text)
    if path is None:
        return False
    try:
        return path.lstat().st_uid == os.geteuid()
    except OSError:
        return False


def _path(text: str) -> Path | None:
    """Returns the file that notes the reference ``text``; None without a cache folder."""
    folder = cache_folder()
    return folder and folder / FOLDER / digest(text)
