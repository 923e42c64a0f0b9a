"""What is told when the server is ready: its models, and a request to try.

These are conveniences, so they never fail.
"""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cfg_serve.check.file import is_ours
from deployments.config.args import AppArgs

CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "How do I make tea?"},
    ],
    "max_tokens": 60,
    "temperature": 0,
    "guidance_scale": 1.5,
    "negative_prompt": "You are a helpful assistant.",
}
"""An example of guidance."""

_TIMEOUT_S = 10


def arguments(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The `args:` of each application."""
    return [application.get("args") or {} for application in config.get("applications") or []]


def has_keys(config: Mapping[str, Any]) -> bool:
    """Whether callers need an API key."""
    return any((args.get("access") or {}).get("keys") for args in arguments(config))


def model_names(config: Mapping[str, Any]) -> list[str]:
    """The models that are loaded: absolute folders, or names on the hub."""
    found: list[str | None] = []
    for application in config["applications"]:
        if is_ours(application):
            args = AppArgs.model_validate(application.get("args") or {}).resolved()
            found += [*(g.model for g in args.generators), *(e.model for e in args.encoders)]
    return [model for model in found if model]


def missing_models(config: Mapping[str, Any]) -> list[str]:
    """Which model is served in place of one that is missing; wrong `args` say nothing here."""
    found = []
    for args in arguments(config):
        with contextlib.suppress(ValueError):
            found += AppArgs.model_validate(args).missing_models()
    return found


def served(url: str) -> str | None:
    """The models that are served, and in which type encoders compute; None if nobody says."""
    with contextlib.suppress(Exception):
        return ", ".join(
            model["id"] + (f" ({model['dtype']})" if "dtype" in model else "")
            for model in models(url)
        )
    return None


def models(url: str) -> list[dict[str, Any]]:
    """The models that /v1/models lists."""
    with urllib.request.urlopen(f"{url}/v1/models", timeout=_TIMEOUT_S) as answer:
        listed: list[dict[str, Any]] = json.load(answer)["data"]
        return listed


def example(url: str, config: Mapping[str, Any]) -> str:
    """A curl line to try first, for the first model that is served."""
    if has_keys(config):  # /v1/models does not answer this process
        return f'curl -s {url}/v1/models -H "Authorization: Bearer $KEY"'
    try:
        return curl_line(url, models(url)[0], chats(config))
    except Exception as error:
        return f"curl -s {url}/v1/models        (no example: {error})"


def curl_line(url: str, model: Mapping[str, Any], is_chat: bool) -> str:
    """An encoder lists the paths that it answers; other models chat if they have a template."""
    generates = "/v1/chat/completions" if is_chat else "/v1/completions"
    path = model.get("endpoints", [generates])[0]
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "Once upon a time", "max_tokens": 40, "guidance_scale": 1.5},
        "/v1/chat/completions": CHAT,
        "/v1/rerank": {"query": "What do cats sit on?", "documents": ["Mats.", "Stars are hot."]},
        "/embed_sparse": {"inputs": "A text."},
    }
    body = {"model": model["id"], **bodies.get(path, {"input": "A text."})}
    return (
        f"curl -s {url}{path} -H 'Content-Type: application/json' \\\n    -d '{json.dumps(body)}'"
    )


def chats(config: Mapping[str, Any]) -> bool:
    """Whether the first generator has a template for conversations, as far as its folder tells."""
    for args in arguments(config):
        with contextlib.suppress(ValueError, OSError):
            for generator in AppArgs.model_validate(args).resolved().generators[:1]:
                return has_template(Path(str(generator.model)))
    return False


def has_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").is_file():
        return True
    file = folder / "tokenizer_config.json"
    return file.is_file() and "chat_template" in json.loads(file.read_text(encoding="utf-8"))
