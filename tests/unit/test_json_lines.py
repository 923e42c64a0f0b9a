"""Log records as JSON, and which loggers get them."""

import json
import logging
import logging.config
import logging.handlers

from deployments.lifecycle import json_lines
from deployments.lifecycle.json_lines import JsonLines


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


def test_the_file_for_vllm_is_what_logging_reads(monkeypatch, capsys):
    environment = {}
    json_lines.use_in_vllm(environment)
    config = json.loads(json_lines.VLLM_CONFIG.read_text())
    assert environment == {json_lines.VLLM_CONFIG_PATH: str(json_lines.VLLM_CONFIG)}
    json_lines.use_in_vllm(theirs := {json_lines.VLLM_CONFIG_PATH: "mine"})
    assert theirs == {json_lines.VLLM_CONFIG_PATH: "mine"}
    monkeypatch.setenv(json_lines.VLLM_LEVEL, "WARNING")
    config["loggers"] = {"test_json_lines": config["loggers"]["vllm"]}
    logging.config.dictConfig(config)
    logger = logging.getLogger("test_json_lines")
    logger.info("not told")
    logger.warning("told")
    (line,) = capsys.readouterr().err.splitlines()
    assert json.loads(line)["message"] == "told"
    logger.handlers.clear()
