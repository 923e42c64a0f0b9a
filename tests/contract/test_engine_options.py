"""Options of the YAML that guided_engine_args must accept, too."""

import pytest

from cfg_core.errors import CompatibilityError
from cfg_core.vllm_plugin import guided_engine_args
from deployments.config.grammars import GrammarArgs


@pytest.mark.parametrize("name", GrammarArgs.model_fields)
def test_the_engine_accepts_every_grammar_setting_that_the_yaml_accepts(name):
    default = getattr(GrammarArgs(), name)
    value = not default if isinstance(default, bool) else 2 * default
    fields = GrammarArgs(**{name: value}).fields
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
