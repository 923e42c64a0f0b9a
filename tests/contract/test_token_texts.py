"""The texts of single tokens: equal to vLLM's, and each decoded once."""

from pathlib import Path

import pytest

from deployments import serve_patches
from deployments.generator.answers.logprobs import TokenTexts

MODEL = Path(__file__).parents[2] / "models" / "stories"


@pytest.fixture(scope="module")
def tokenizer():
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(MODEL))


def test_all_tokens_have_the_texts_that_vllm_gives_them(tokenizer):
    from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens as stock

    texts, asked = TokenTexts(stock), [*range(len(tokenizer)), 5, 5]
    expected = stock(tokenizer, asked)
    assert texts(tokenizer, asked) == texts(tokenizer, asked) == expected
    assert texts(tokenizer, [7, 300, 7]) == stock(tokenizer, [7, 300, 7])


def test_each_is_decoded_once_and_a_list_may_be_changed(tokenizer):
    decoded = []

    def decode(_, ids):
        decoded.extend(ids)
        return [f"<{number}>" for number in ids]

    texts = TokenTexts(decode)
    texts(tokenizer, [1, 2])[0] = "changed"
    assert texts(tokenizer, [1, 2, 3]) == ["<1>", "<2>", "<3>"]
    assert decoded == [1, 2, 3]


def test_parts_of_a_character_have_texts_in_the_rankings_of_streams():
    """As vLLM's own candidates have them: with the parts that were sampled before."""
    import numpy as np
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import get_tokenizer
    from vllm.v1.engine import EngineCoreRequest, logprobs
    from vllm.v1.outputs import LogprobsLists

    from cfg_core.patching import stock
    from cfg_core.vllm_plugin.frontend import logprobs as ours
    from cfg_core.vllm_plugin.vllm_patches import PATCHES

    (update_row,) = [p for p in PATCHES if p.attribute == "_update_sample_logprobs"]

    tokenizer = get_tokenizer(str(MODEL))
    *parts, last = tokenizer.encode("\U0001f3f4", add_special_tokens=False)
    assert parts
    plain = logprobs.LogprobsProcessor
    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__)
    request = EngineCoreRequest(**fields | {"sampling_params": SamplingParams(logprobs=1)})
    processor = plain.from_new_request(tokenizer, request)
    processor.stream_columns = ours.StreamColumns(streams=2, top=1)
    update = ours.update_sample_logprobs(stock(update_row))
    for token in (*parts, last):
        ids = [token, token, token, token, token, token, token]  # sampled, top; ours: 1 + 2 * 2
        rows = LogprobsLists(np.array([ids]), np.full((1, 7), -0.5), np.array([1]), None)
        update(processor, rows)
    entry = processor.logprobs[-1][last]
    assert entry.decoded_token == "\U0001f3f4"
    assert [ranking[last].decoded_token for ranking in entry.rankings] == ["\U0001f3f4"] * 2


def test_vllm_looks_up_the_function_where_it_is_replaced(monkeypatch, tokenizer):
    """LogprobsProcessor finds the function by its name in its own module.

    It reads nothing else of a token's text.
    """
    import numpy as np
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest, logprobs
    from vllm.v1.outputs import LogprobsLists

    serve_patches.apply("generator replica")
    serve_patches.apply("generator replica")
    monkeypatch.setattr(
        logprobs.convert_ids_list_to_tokens, "decode", lambda _, ids: [f"<{i}>" for i in ids]
    )
    fields = dict.fromkeys(EngineCoreRequest.__struct_fields__)
    request = EngineCoreRequest(**fields | {"sampling_params": SamplingParams(logprobs=1)})
    processor = logprobs.LogprobsProcessor.from_new_request(tokenizer, request)
    rows = LogprobsLists(np.array([[7, 8]]), np.array([[-0.5, -1.0]]), np.array([1]), None)
    processor._update_sample_logprobs(rows)
    (found,) = processor.logprobs
    assert [found[token].decoded_token for token in (7, 8)] == ["<7>", "<8>"]
