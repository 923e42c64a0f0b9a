"""lm-evaluation-harness against a server with guidance: its model `cfg-serve`.

    python -m cfg_core.harness run --model cfg-serve --tasks arc_easy --model_args \\
        model=NAME,base_url=http://127.0.0.1:8000/v1/completions,tokenizer=FOLDER,guidance_scale=1.5

The arguments are those of the harness's own command and of its model `local-completions`. Guidance
fields, such as `guidance_scale` and `negative_prompt`, go into the body of each request. A choice
is scored by its guided log-probability (`guidance_score_tokens`), and generated texts are guided.

`negative_from=Question:` makes the negative of each request from its own context: the context from
the last `Question:` on, so without what comes before, such as a passage or examples.

The harness (https://github.com/EleutherAI/lm-evaluation-harness) must be installed, with its extra
`api`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI

from cfg_core.params import GuidanceParams, looks_like_guidance
from cfg_core.params.fields import NEGATIVE_IDS, SCORE_TOKENS


class ScoredTokens(list[int]):
    """The token ids of a prompt.

    scored: how many at its end are scored.
    negative: the negative's token ids, if each prompt has its own.
    """

    scored: int = 0
    negative: list[int] | None = None


@register_model("cfg-serve")
class GuidedCompletions(LocalCompletionsAPI):  # type: ignore[misc]  # lm_eval has no types
    """The harness's own client of /v1/completions, with guidance fields in each body.

    negative_from: the text at which each negative begins in its context; None: as the guidance
        fields say.

    The constructor raises GuidanceError for a field or value that cannot be used, and ValueError
    for options under which the number of scored tokens is not known.
    """

    def __init__(self, negative_from: str | None = None, **options: Any) -> None:
        self.negative_from = negative_from
        fields = {name: options.pop(name) for name in [*options] if looks_like_guidance(name)}
        params = GuidanceParams.from_fields(fields)
        if params is not None and params.score_tokens is not None:
            raise ValueError(f"The harness sets {SCORE_TOKENS} itself: leave it out.")
        self.guidance = {} if params is None else params.to_extra_args()
        super().__init__(**options)
        if not self.tokenized_requests or self._batch_size != 1:
            raise ValueError(
                "Guided scores need tokenized_requests=True, and batch_size=1: use num_concurrent"
                " to send several requests at a time."
            )

    def batch_loglikelihood_requests(
        self, chunks: Iterable[Any]
    ) -> tuple[list[ScoredTokens], list[int], list[Any]]:
        """As the harness's method, with the number of scored tokens at each prompt."""
        inputs, contexts, keys = super().batch_loglikelihood_requests(chunks)
        marked = []
        for ids, context in zip(inputs, contexts, strict=True):
            prompt = ScoredTokens(ids)
            prompt.scored = len(ids) - context
            if self.negative_from is not None:
                prompt.negative = self._negative(ids[:context], self.negative_from)
            marked.append(prompt)
        return marked, contexts, keys

    def _negative(self, context: list[int], marker: str) -> list[int]:
        """The token ids of `context` from its last `marker` on. Raises ValueError without one."""
        text: str = self.tokenizer.decode(context)
        at = text.rfind(marker)
        if at < 0:
            raise ValueError(
                f"This context has no {marker!r} at which its negative could begin: {text}"
            )
        ids: list[int] = self.tok_encode(text[at:])
        return ids

    def _create_payload(self, messages: Any, generate: bool = False, **options: Any) -> Any:
        payload = super()._create_payload(messages, generate=generate, **options)
        negative = None
        if not generate:
            payload[SCORE_TOKENS] = messages[0].scored
            negative = messages[0].negative
        elif self.negative_from is not None:
            negative = self._negative(messages[0], self.negative_from)
        if negative is not None:
            payload[NEGATIVE_IDS] = negative
        return {**payload, **self.guidance}


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
