"""vLLM's random ids, which two replicas word differently: a stream that moves keeps its own.

Each form that vLLM makes is one that deployments/requests/progress.py knows.
"""

import re
import uuid
from pathlib import Path

import pytest
import vllm
from vllm.entrypoints.openai.responses.context import MCP_PREFIX
from vllm.parser.mistral import MistralToolCall
from vllm.renderers.chat_utils import make_tool_call_id
from vllm.utils import random_uuid

from deployments.requests.progress import OfOneReplica

WORDED = (
    "entrypoints/openai",
    "entrypoints/anthropic",
    "entrypoints/mcp",
    "tool_parsers",
    "parser",
)
"""Where vLLM words events."""
MADE = re.compile(r'f"([^"]*)\{(?:random_uuid\(\)|random_id)\}"')
OF_REQUESTS = {"chatcmpl-", "cmpl-"}
"""They are the request's own id, which goes with it to another replica."""


def item_ids():
    """The beginnings of all ids that vLLM makes where it words events."""
    root, found = Path(vllm.__file__).parent, set()
    for path in (path for part in WORDED for path in (root / part).rglob("*.py")):
        found |= set(MADE.findall(path.read_text(encoding="utf-8")))
    known = {prefix.replace("{MCP_PREFIX}", MCP_PREFIX) for prefix in found - OF_REQUESTS}
    return {re.sub(r"{[^}]*}", "0", prefix) for prefix in known}


FORMS = {
    "tool call": lambda: f'"id":"{make_tool_call_id()}"',
    "tool call, Mistral": lambda: f'"id":"{MistralToolCall.generate_random_id()}"',
    "reasoning": lambda: f'"type":"signature_delta","signature":"{uuid.uuid4().hex}"',
}
FORMS |= {
    prefix: lambda prefix=prefix: f'"item_id":"{prefix}{random_uuid()}"'
    for prefix in sorted(item_ids())
}


def test_there_are_as_many_forms_as_before():
    assert {"msg_", "rs_", "fc_", "call_", "call_0_", "mcp_"} <= set(FORMS)


@pytest.mark.parametrize("form", FORMS)
def test_another_replica_words_the_event_as_the_first_did(form):
    first, second = OfOneReplica(), OfOneReplica()
    told, again = (f"data: {{{FORMS[form]()}}}\n\n" for _ in "ab")
    assert told != again
    first.read(told)
    assert second.worded_by(first, again) == told
    second = OfOneReplica()
    second.read(again)
    assert second.checksum == first.checksum
