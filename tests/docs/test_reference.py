"""The reference has every field and key that the code knows, and no other."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

from cfg_core.params.fields import AMBIGUOUS, CHAT_FIELDS, FIELDS, SYNONYMS
from cfg_core.params.follower import KEYS
from cfg_core.prefill_only.options import EngineOptions
from cfg_core.vllm_plugin import guided_engine_args
from deployments.config.base import YamlArgs
from deployments.config.engine_keys import FRONTEND_KEYS, RESERVED_ENGINE_KEYS
from deployments.ingress.openapi.schemas import ENCODE, SERVER

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
REQUESTS, ENGINE, YAML = "request-fields.md", "engine-options.md", "configuration.md"


def names(page: str, mark: str) -> list[str]:
    """The names in the first column of the tables after a mark."""
    text = (DOCS / page).read_text(encoding="utf-8")
    (block,) = re.findall(rf"<!-- {re.escape(mark)} -->\n(.*?)<!-- end -->", text, re.DOTALL)
    return re.findall(r"^\| `([^`]+)` \|", block, re.MULTILINE)


def sections() -> Iterator[tuple[str, list[str]]]:
    """Every section of the YAML that the code reads, with its keys."""
    args = importlib.import_module("deployments.config.args").AppArgs
    waiting = [YamlArgs]
    while waiting:
        for section in waiting.pop().__subclasses__():
            waiting.append(section)
            if "section" in vars(section):  # a base of two sections is none itself
                yield section.section, list(section.model_fields)
    for name, field in args.model_fields.items():
        if dataclasses.is_dataclass(field.annotation):
            yield name, [key.name for key in dataclasses.fields(field.annotation)]


def test_every_request_field_is_on_the_page() -> None:
    assert set(names(REQUESTS, "guidance")) == {*CHAT_FIELDS, *SYNONYMS}
    assert set(names(REQUESTS, "streams")) == set(KEYS) - {"multi_modal_data"}  # offline
    assert set(names(REQUESTS, "refused")) == set(AMBIGUOUS)
    assert set(names(REQUESTS, "server")) == set(SERVER)
    of_encoders = {field for schema in ENCODE.values() for field in schema["properties"]}
    assert set(names(REQUESTS, "encoders")) == of_encoders
    shown = [*names(REQUESTS, "guidance"), *names(REQUESTS, "streams"), *of_encoders]
    assert len(shown) >= 45


def test_every_guidance_field_is_explained_in_detail() -> None:
    text = (DOCS / "guidance.md").read_text(encoding="utf-8")
    for field in (*FIELDS, *CHAT_FIELDS, *SYNONYMS, *AMBIGUOUS):
        assert f"`{field}`" in text, field


def test_every_yaml_key_is_on_the_page() -> None:
    found = list(sections())
    assert len(found) >= 8
    for section, keys in found:
        assert names(YAML, section) == keys, section
    assert sum(len(keys) for _, keys in found) >= 70


def test_every_option_of_the_engines_is_on_the_page() -> None:
    guided = inspect.signature(guided_engine_args).parameters
    assert names(ENGINE, "guided") == list(guided)
    assert set(names(ENGINE, "reserved")) == set(RESERVED_ENGINE_KEYS)
    assert set(names(ENGINE, "frontend")) == FRONTEND_KEYS
    of_encoder = [field.name for field in dataclasses.fields(EngineOptions)]
    assert names(ENGINE, "encoder") == of_encoder
    assert len(guided) + len(FRONTEND_KEYS) + len(of_encoder) >= 35
