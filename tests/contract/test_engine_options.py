"""Options of the YAML that guided_engine_args must accept, too."""

import dataclasses

import pytest

from cfg_core.errors import CompatibilityError
from cfg_core.grammars.trials import GrammarLimits
from cfg_core.vllm_plugin import guided_engine_args
from deployments.config.args import AppArgs

FIELDS = [(field.name, field.default) for field in dataclasses.fields(GrammarLimits)]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, not usual if isinstance(usual, bool) else 2 * usual) for name, usual in FIELDS),
        ("json_whitespace", None),
    ],
)
def test_the_engine_accepts_every_grammar_setting_that_the_yaml_accepts(name, value):
    args = AppArgs.model_validate({"model": "m", "grammars": {name: value}})
    fields = args.plugin_kwargs["grammars"]
    assert fields == {name: value}
    assert (
        guided_engine_args(grammars=fields)["additional_config"]["cfg_serve"]["grammars"] == fields
    )


@pytest.mark.parametrize(
    ("name", "value"), [("places", True), ("places", 0), ("cpu_s", "4"), ("at_start", 1)]
)
def test_a_grammar_setting_of_a_wrong_type_is_refused(name, value):
    with pytest.raises(
        CompatibilityError, match=f"`{name}` in `grammars` is {value!r}: it must be"
    ):
        guided_engine_args(grammars={name: value})
