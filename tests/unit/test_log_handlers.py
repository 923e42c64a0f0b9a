"""Log handlers survive a dictConfig such as vLLM's."""

import logging
import logging.config
import logging.handlers
from contextlib import closing

from deployments.observability.log_handlers import log_handlers_kept

CONFIG = {"version": 1, "disable_existing_loggers": False}


def test_handlers_outlive_a_configuration(tmp_path):
    with closing(logging.FileHandler(tmp_path / "log")) as file:
        handler = logging.handlers.MemoryHandler(10, target=file)
        with log_handlers_kept():
            logging.config.dictConfig(CONFIG)
            inside = logging.StreamHandler()
        assert handler.target is not None
        known = [reference() for reference in logging._handlerList]
        assert handler in known
        assert inside in known
        with log_handlers_kept():  # those of pytest
            lost = logging.handlers.MemoryHandler(10, target=handler)
            logging.config.dictConfig(CONFIG)
        assert lost.target is None, "dictConfig closes handlers that are not kept"
