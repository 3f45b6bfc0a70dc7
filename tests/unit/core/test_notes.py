"""Notes for the user arrive however the user's program configures `logging`."""

from __future__ import annotations

import logging
import logging.config
from collections.abc import Callable, Iterator

import pytest

from penstock.core.notes import note_logger

logger = note_logger("penstock.a_module_of_ours")


def configure() -> None:
    logging.config.dictConfig({"version": 1, "root": {"level": "ERROR"}})


@pytest.fixture
def as_before() -> Iterator[None]:
    """Loggers of others that were disabled, and the root's level, are put back."""
    manager, root = logging.Logger.manager, logging.getLogger()
    others = [one for one in manager.loggerDict.values() if isinstance(one, logging.Logger)]
    disabled, level, handlers = [one.disabled for one in others], root.level, root.handlers[:]
    yield
    logging.disable(logging.NOTSET)
    root.setLevel(level)
    root.handlers[:] = handlers
    for one, was in zip(others, disabled, strict=True):
        one.disabled = was


@pytest.mark.usefixtures("as_before")
@pytest.mark.parametrize("change", [configure, lambda: logging.disable(logging.CRITICAL)])
def test_a_note_arrives_however_the_program_configures_logging(
    change: Callable[[], None], notes: list[str]
) -> None:
    logger.info("before")
    change()
    logger.info("%s and %d", "after", 1)
    logger.debug("details are no notes")
    assert notes == ["before", "after and 1"]
