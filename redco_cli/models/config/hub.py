"""While the Hugging Face hub does not answer: one line that says so, where its library writes two for each attempt."""

from __future__ import annotations

import logging

from redco_cli.console import note

_LIBRARY = "huggingface_hub.utils._http"


def tell_retries_once() -> None:
    """From now on the first attempt that fails is noted; those after it are silent, and the last one's error is raised.

    The library tries again for about 25 seconds.
    """
    logger = logging.getLogger(_LIBRARY)
    if not any(isinstance(existing, _Once) for existing in logger.filters):
        logger.addFilter(_Once())


class _Once(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        self._told = False

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno > logging.WARNING:
            return True
        if not self._told:
            self._told = True
            note("the Hugging Face hub does not answer; trying again for half a minute (HF_HUB_OFFLINE=1 does not ask)")
        return False
