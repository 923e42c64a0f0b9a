"""Late interaction (ColBERT): checkpoints that make a vector for each token of a query or document.

Three formats are read: modules of sentence-transformers 6 (`MultiVectorMask`), PyLate's
(`model_type: ColBERT`), and Stanford's (`HF_ColBERT` and `artifact.metadata`). This module does not
import torch.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cfg_core.errors import ConfigError
from cfg_core.prefill_only.models.settings import DenseLayer, dense_layer, kinds_of, read_json
from cfg_core.prefill_only.types import Role

_LENGTH = 32  # of a query, where a checkpoint does not say


@dataclass(frozen=True, kw_only=True)
class LateInteraction:
    """How queries and documents become vectors, besides the model and its projection."""

    query_length: int | None = None
    """Tokens of the longest query. None: as for any input."""
    document_length: int | None = None
    expanded_length: int = 0
    """Queries with fewer tokens are filled up to this with a token that stands for more words."""
    expansion_token: str | None = None
    """That token. None: the tokenizer's mask token, or else its end of text."""
    attend: bool = False
    """Whether other tokens attend to those that are filled in."""
    skipped_words: tuple[str, ...] = ()
    """Tokens that have no vector."""
    skipped_in: tuple[str, ...] = ("document",)
    """The roles in which they have none."""
    marks: tuple[str, ...] = ()
    """Marks of queries and documents that the tokenizer must not split."""
    mean: bool = False
    """Whether a score is divided by the number of a query's vectors."""
    expansion_id: int = 0
    skipped_ids: frozenset[int] = field(default_factory=frozenset)

    def limit(self, role: Role) -> int | None:
        """Tokens of the longest input in a role; None: as for any input."""
        return self.query_length if role == "query" else self.document_length


def late_interaction(
    path: Path, config: Mapping[str, Any], modules: list[dict[str, Any]]
) -> dict[str, Any]:
    """The settings of a late-interaction checkpoint; empty for other models."""
    saved = read_json(path / "config_sentence_transformers.json")
    if "MultiVectorMask" in kinds_of(modules):
        return _native(path, modules, saved)
    if modules and saved.get("model_type") == "ColBERT":
        return _pylate(path, modules, saved)
    if str((config.get("architectures") or [""])[0]) == "HF_ColBERT":
        return _stanford(path)
    return {}


def _settings(
    late: LateInteraction, dense: tuple[DenseLayer, ...], normalize: bool, **more: Any
) -> dict[str, Any]:
    return {
        "head": "late_interaction",
        "late": late,
        "dense": dense,
        "normalize": normalize,
        **more,
    }


def _native(path: Path, modules: list[dict[str, Any]], saved: Mapping[str, Any]) -> dict[str, Any]:
    kinds = kinds_of(modules)
    _check_order(kinds, ("Transformer", "Dense", "MultiVectorMask", "Normalize"))
    transformer = read_json(path / "sentence_bert_config.json")
    mask = read_json(path / modules[kinds.index("MultiVectorMask")]["path"] / "config.json")
    if mask.get("keep_only_token_ids"):
        raise ConfigError("MultiVectorMask has keep_only_token_ids, which is for images.")
    late = LateInteraction(
        **_lengths(transformer),
        skipped_words=tuple(mask.get("skiplist_words") or ()),
        skipped_in=tuple(mask.get("skiplist_tasks") or ("document",)),
        mean=saved.get("similarity_fn_name") == "meanmaxsim",
    )
    return _settings(late, _projections(path, modules), "Normalize" in kinds)


def _lengths(values: Mapping[str, Any]) -> dict[str, Any]:
    """Lengths and expansion, as sentence-transformers saves them with its Transformer."""
    expansion = values.get("query_expansion") or {}
    query_length = values.get("query_length")
    if expansion:
        length = int(expansion["length"])
        fixed = expansion.get("strategy") == "fixed"
        query_length = length if fixed else query_length and max(query_length, length)
    return {
        "query_length": query_length,
        "document_length": values.get("document_length"),
        "expanded_length": int(expansion.get("length") or 0),
        "expansion_token": expansion.get("token"),
        "attend": bool(expansion.get("attend")),
    }


def _pylate(path: Path, modules: list[dict[str, Any]], saved: Mapping[str, Any]) -> dict[str, Any]:
    _check_order(kinds_of(modules), ("Transformer", "Dense"))
    expands = saved.get("do_query_expansion") is not False
    attend = saved.get("attend_to_expansion_tokens", saved.get("attend_to_mask_tokens"))
    length = saved.get("query_length") or _LENGTH
    marks = {role: saved.get(f"{role}_prefix") or "" for role in ("query", "document")}
    words = saved.get("skiplist_words")
    late = LateInteraction(
        query_length=length,
        document_length=saved.get("document_length"),
        expanded_length=length if expands else 0,
        attend=bool(attend),
        skipped_words=tuple(string.punctuation if words is None else words),
        marks=tuple(mark for mark in marks.values() if mark),
    )
    named = saved.get("prompts") or {}
    prompts = {
        role: mark + (named.get(role) or "").removeprefix(mark) for role, mark in marks.items()
    }
    return _settings(late, _projections(path, modules), True, prompts={**named, **prompts})


def _stanford(path: Path) -> dict[str, Any]:
    saved = read_json(path / "artifact.metadata")
    marks = {
        "query": f"{saved.get('query_token_id') or '[unused0]'} ",
        "document": f"{saved.get('doc_token_id') or '[unused1]'} ",
    }
    length = saved.get("query_maxlen") or _LENGTH
    late = LateInteraction(
        query_length=length,
        document_length=saved.get("doc_maxlen"),
        expanded_length=length,
        attend=bool(saved.get("attend_to_mask_tokens")),
        skipped_words=tuple(string.punctuation if saved.get("mask_punctuation", True) else ()),
        marks=tuple(marks.values()),
    )
    projection = DenseLayer(path=path, activation="Identity", bias=False)
    return _settings(late, (projection,), True, prompts=marks)


def _check_order(kinds: list[str], known: tuple[str, ...]) -> None:
    places = [known.index(kind) if kind in known else -1 for kind in kinds]
    if -1 in places or places != sorted(places) or places.count(0) != 1:
        raise ConfigError(
            f"modules.json lists {', '.join(kinds)}: for late interaction, only {', '.join(known)}"
            " (in this order) are supported. Serve this model with sentence-transformers."
        )


def _projections(path: Path, modules: list[dict[str, Any]]) -> tuple[DenseLayer, ...]:
    return tuple(
        dense_layer(path / module["path"], read_json(path / module["path"] / "config.json"), True)
        for module, kind in zip(modules, kinds_of(modules), strict=True)
        if kind == "Dense"
    )
