"""Log records as JSON, and which loggers get them."""

import json
import logging
import logging.config
import logging.handlers
import os
import subprocess
import sys

import pytest

from deployments.observability import json_lines
from deployments.observability.json_lines import JsonLines


def test_a_record_is_one_line_with_its_own_fields():
    record = logging.makeLogRecord(
        {"msg": "two\nlines of %s", "args": ("x",), "name": "a", "request_id": "r1", "odd": {1}}
    )
    told = JsonLines().format(record)
    assert "\n" not in told
    found = json.loads(told)
    assert found["message"] == "two\nlines of x"
    assert found["request_id"] == "r1"
    assert found["logger"] == "a"
    assert "args" not in found


def test_a_traceback_is_in_the_same_line():
    try:
        raise ValueError("no")
    except ValueError as error:
        info = (type(error), error, error.__traceback__)
    told = JsonLines().format(logging.makeLogRecord({"msg": "m", "exc_info": info}))
    assert "\n" not in told
    assert "ValueError: no" in json.loads(told)["exc_text"]


def test_serve_tells_by_the_formatter_of_its_file():
    class JSONFormatter(logging.Formatter):
        """Stands for Ray's, which it is named as."""

    logger = logging.Logger("x")
    assert not json_lines.is_wanted(logger)
    target = logging.NullHandler()
    target.setFormatter(JSONFormatter())
    logger.addHandler(logging.handlers.MemoryHandler(1, target=target))
    assert json_lines.is_wanted(logger)


def test_a_file_that_the_environment_names_stays():
    json_lines.use_in_vllm(environment := {})
    assert environment == {json_lines.VLLM_CONFIG_PATH: str(json_lines.VLLM_CONFIG)}
    json_lines.use_in_vllm(theirs := {json_lines.VLLM_CONFIG_PATH: "mine"})
    assert theirs == {json_lines.VLLM_CONFIG_PATH: "mine"}


def test_vllm_gets_no_file_if_it_must_not_configure_its_loggers():
    """It would refuse to start."""
    json_lines.use_in_vllm(environment := {json_lines.VLLM_CONFIGURE: "0"})
    assert environment == {json_lines.VLLM_CONFIGURE: "0"}


@pytest.mark.parametrize("level", ["WARNING", "warning"])
def test_the_file_for_vllm_is_what_logging_reads(level):
    code = f"""
import json, logging, logging.config
logging.config.dictConfig(json.load(open({str(json_lines.VLLM_CONFIG)!r})))
logger = logging.getLogger("vllm.engine")
assert logger.getEffectiveLevel() == logging.WARNING
logger.info("not told")
logger.warning("told")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"VLLM_LOGGING_LEVEL": level},
    )
    assert done.returncode == 0, done.stderr
    (line,) = done.stderr.splitlines()
    assert json.loads(line)["message"] == "told"
