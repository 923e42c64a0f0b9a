"""Records of vLLM's readers keep no text of a client at WARNING and above."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator

import pytest

from deployments.observability.client_texts import hidden, hide_client_texts

SECRET = "mauve walrus"
READER = "vllm.entrypoints.openai.chat_completion.serving"


@pytest.fixture
def factory() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    yield
    logging.setLogRecordFactory(before)


def record(name: str, level: int, message: str, *args: object, fails: bool = False) -> str:
    info = None
    if fails:
        try:
            raise ValueError(SECRET)
        except ValueError:
            info = sys.exc_info()
    made = logging.LogRecord(name, level, __file__, 1, message, args, info)
    return logging.Formatter("%(message)s").format(hidden(made))


@pytest.mark.parametrize("level", [logging.WARNING, logging.ERROR])
def test_arguments_are_cut_but_for_numbers(level: int) -> None:
    text = record(READER, level, "Error with %s, %d of %s", SECRET, 3, ValueError(SECRET))
    assert text == "Error with ..., 3 of ..."


def test_named_arguments_are_cut() -> None:
    assert record(READER, logging.ERROR, "%(a)s %(b)d", {"a": SECRET, "b": 2}) == "... 2"


def test_an_exception_keeps_its_class_and_its_place() -> None:
    text = record(READER, logging.ERROR, "Error in extracting tool call", fails=True)
    assert SECRET not in text.replace("raise ValueError(SECRET)", "")
    assert text.startswith("Error in extracting tool call\nTraceback")
    assert "test_client_texts.py" in text
    assert text.endswith("ValueError")


@pytest.mark.parametrize(
    ("name", "level"),
    [(READER, logging.INFO), ("ray.serve", logging.WARNING), ("vllm.config", logging.WARNING)],
)
def test_other_records_are_as_they_were(name: str, level: int) -> None:
    assert record(name, level, "%s", SECRET) == SECRET


def test_it_holds_for_every_handler(factory: None, caplog: pytest.LogCaptureFixture) -> None:
    hide_client_texts()
    hide_client_texts()
    with caplog.at_level(logging.WARNING):
        logging.getLogger(READER).warning("refused: %s", SECRET)
    assert SECRET not in caplog.text
    assert "refused: ..." in caplog.text


def test_a_record_can_be_made_of_values(factory: None) -> None:
    """As handlers do that send records to other processes."""
    hide_client_texts()
    made = logging.makeLogRecord({"name": READER, "msg": "%d", "args": (3,), "levelno": 40})
    assert made.getMessage() == "3"
