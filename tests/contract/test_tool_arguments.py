"""The arguments of tools are JSON objects, in the format of every model that vLLM has a grammar of.

Without the replacement, vLLM and xgrammar allow any JSON for a tool that is not strict.
"""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from cfg_core.patching import load, stock
from deployments import serve_patches
from deployments.generator.engine.request_patches import EMPTY, OBJECT

pytest.importorskip("vllm")
import vllm.entrypoints.openai.chat_completion.protocol as protocol
import xgrammar
from vllm.tool_parsers import structural_tag_registry as registry

ROWS = [row for row in serve_patches.PATCHES if row.by.endswith("request_patches:of_function")]
WITHOUT: dict[str, Any] = {"name": "now"}
LOOSE = {"name": "now", "strict": False, "parameters": {"type": "object", "properties": {"a": {}}}}
SHAPED = {"glm_4_7", "hy_v4", "kimi_k3"}  # these write each parameter as an element of its own
MODELS = sorted(registry.SUPPORTED_STRUCTURAL_TAG_MODELS - SHAPED)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target)
def test_the_stock_functions_allow_any_json(row: Any) -> None:
    """The row can go once this fails."""
    module = importlib.import_module(row.target.partition(":")[0])
    function = module.FunctionToolParam(type="function", function=WITHOUT).function
    original = stock(row)
    assert original(function) is True
    assert load(row.by)(original)(function) == EMPTY


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("model", MODELS)
def test_the_formats_of_all_models_take_objects(
    model: str, choice: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for row in ROWS:
        monkeypatch.setattr(row.owner, row.attribute, load(row.by)(stock(row)))
    tools = [
        protocol.ChatCompletionToolsParam(type="function", function=function)
        for function in (WITHOUT, {**LOOSE, "name": "other"})
    ]
    level = registry.ToolStrictLevel.FUNCTION
    tag = registry.get_model_structural_tag(model, tools, choice, False, strict_level=level)
    assert tag is not None
    schemas = list(schemas_in(tag.model_dump()))
    xgrammar.Grammar.from_structural_tag(tag)
    assert EMPTY in schemas
    assert OBJECT in schemas
    assert True not in schemas


def schemas_in(value: Any) -> Any:
    if isinstance(value, list):
        for item in value:
            yield from schemas_in(item)
    elif isinstance(value, dict):
        if value.get("type") == "json_schema":
            yield value["json_schema"]
        for item in value.values():
            yield from schemas_in(item)


def test_strict_parameters_stay() -> None:
    row, parameters = ROWS[0], {"type": "object", "properties": {"a": {"type": "string"}}}
    module = importlib.import_module(row.target.partition(":")[0])
    strict = {**WITHOUT, "strict": True, "parameters": parameters}
    function = module.FunctionToolParam(type="function", function=strict).function
    assert load(row.by)(stock(row))(function) == json.loads(json.dumps(parameters))
