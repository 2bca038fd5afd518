import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """Runs configure logging for the whole process, with handlers on streams and files of one test."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for logger in (root, logging.getLogger("asynctensorrlhf.outcome")):
        for handler in set(logger.handlers) - set(handlers):
            handler.close()
        logger.handlers = handlers if logger is root else []
    root.setLevel(level)
