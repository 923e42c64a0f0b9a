"""Errors say what a value is in the words of JSON."""

import pytest

from cfg_core.errors import GuidanceError
from cfg_core.params.checks import check_count, check_number, check_token_ids
from cfg_core.params.words import kind_of

WORDS = [
    ("abc", "a string"),
    (None, "null"),
    (True, "true"),
    (7, "a number"),
    (1.5, "1.5"),
    ([], "a list"),
    ((1, 2), "a list"),
    ({"a": 1}, "an object"),
    ({}, "an empty object"),
    (b"x", "a value of bytes"),
]


@pytest.mark.parametrize(("value", "words"), WORDS, ids=str)
def test_words(value, words):
    assert kind_of(value) == words


@pytest.mark.parametrize("value", ["abc", None, True, [1], {"a": 1}], ids=str)
@pytest.mark.parametrize("check", [check_number, lambda v, p: check_count(v, p, 0)])
def test_errors_name_no_class_of_python(check, value):
    with pytest.raises(GuidanceError) as error:
        check(value, "guidance_scale")
    told = {word.strip(".,") for word in str(error.value).split()}
    assert not {"str", "NoneType", "bool", "int", "dict"} & told


def test_an_entry_of_token_ids_is_named_too():
    with pytest.raises(GuidanceError, match=r"x\[1\] must be an integer, not 2\.0"):
        check_token_ids([1, 2.0], "x")
