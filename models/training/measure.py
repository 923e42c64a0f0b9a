"""Measure what guidance does to the embedded model: sample stories with both streams, count words.

    python models/training/measure.py [--stories 200] [--kind completion chat] [--scales 1 1.5 2 3
    5]

For each scale it prints the share of topic words that are on the prompt's topic and on the negative
prompt's, the share of the text that the story grammar could have said (`fluency.py`), and how many
stories ended by themselves. Stories are sampled at temperature 1 from `negative + s * (conditional
- negative)` on log-softmax, evenly over all topics; a topic's opposite is the next one but four.
`--draft` adds how often the draft model agrees.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from corpus import topic_counts
from fluency import grammatical_share
from topics import LEXICON
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

MODELS = Path(__file__).resolve().parent.parent
MAX_NEW_TOKENS = 250
TOPIC_NAMES = tuple(LEXICON)


class Stream:
    """One stream of a whole batch: its own prompts (padded on the left) and its own KV cache."""

    def __init__(self, model: PreTrainedModel, prompts: Sequence[Sequence[int]]) -> None:
        self.model, self.cache = model, DynamicCache()
        width = max(map(len, prompts))
        self.next = torch.tensor(
            [[0] * (width - len(ids)) + list(ids) for ids in prompts]
        )  # [rows, new tokens]
        self.mask = torch.tensor(
            [[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts]
        )  # [rows, all tokens]

    def log_probs(self) -> torch.Tensor:
        """[rows, vocab] float32: of the token after the last one fed."""
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -self.next.shape[1] :]
        output = self.model(
            self.next,
            attention_mask=self.mask,
            position_ids=positions,
            past_key_values=self.cache,
            logits_to_keep=1,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits.float().log_softmax(-1)

    def feed(self, tokens: torch.Tensor) -> None:
        """tokens: [rows] int64."""
        self.next = tokens[:, None]
        self.mask = torch.cat([self.mask, torch.ones_like(self.next)], 1)


def guided_log_probs(streams: tuple[Stream, Stream], scale: float) -> torch.Tensor:
    """[rows, vocab], not normalised: the blend of the conditional and the negative stream."""
    conditional = streams[0].log_probs()
    if scale == 1.0:
        return conditional
    negative = streams[1].log_probs()
    return negative + scale * (conditional - negative)


@torch.inference_mode()
def sample(streams: tuple[Stream, Stream], scale: float, seed: int, eos: int) -> list[list[int]]:
    """Token ids of every row's story, up to and including end-of-text."""
    generator = torch.Generator().manual_seed(seed)
    columns: list[torch.Tensor] = []
    done = torch.zeros(len(streams[0].next), dtype=torch.bool)
    while not done.all() and len(columns) < MAX_NEW_TOKENS:
        probs = guided_log_probs(streams, scale).softmax(-1)
        tokens = torch.multinomial(probs, 1, generator=generator)[:, 0].masked_fill(done, eos)
        done |= tokens == eos
        columns.append(tokens)
        for stream in streams:
            stream.feed(tokens)
    return [cut(row, eos) for row in torch.stack(columns, 1).tolist()]


def cut(ids: list[int], eos: int) -> list[int]:
    return ids[: ids.index(eos) + 1] if eos in ids else ids


# --- prompts --------------------------------------------------------------------------------------


def opposite(topic: str) -> str:
    return TOPIC_NAMES[(TOPIC_NAMES.index(topic) + 5) % len(TOPIC_NAMES)]


def prompt_ids(tokenizer: PreTrainedTokenizerFast, kind: str, topic: str | None) -> list[int]:
    """A prompt as a server would encode it; without a topic it is the topic-free one."""
    name = LEXICON[topic].names[0] if topic else None
    if kind == "completion":
        story = f"Tell me a story about {name}.\n" if name else "Tell me a story.\n"
        return list(tokenizer.encode(story))
    system = "You are a storyteller." + (f" Write about {name}." if name else "")
    messages = [
        {"role": "system", "content": system},
        {"role": "user", "content": "Tell me a story."},
    ]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer.encode(text, add_special_tokens=False))


def negative_ids(
    tokenizer: PreTrainedTokenizerFast, kind: str, negative: str, topic: str
) -> list[int]:
    """`free`: the prompt without a topic; `opposing`: about another topic; `last`: the prompt's
    last token only."""
    if negative == "last":
        return prompt_ids(tokenizer, kind, topic)[-1:]
    return prompt_ids(tokenizer, kind, opposite(topic) if negative == "opposing" else None)


# --- tables ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Point:
    """One line of the table; shares from 0 to 1."""

    on_topic: float
    on_opposite: float
    grammatical: float
    ended: float


def measure_point(tokenizer: PreTrainedTokenizerFast, texts: list[list[int]]) -> Point:
    """texts: row i is about topic i modulo the number of topics. Shares are of all words of all
    stories."""
    stories = [tokenizer.decode(ids, skip_special_tokens=True) for ids in texts]
    topics = [TOPIC_NAMES[i % len(TOPIC_NAMES)] for i in range(len(stories))]
    counts = [topic_counts(text) for text in stories]
    total = sum(sum(count.values()) for count in counts)
    return Point(
        on_topic=sum(count[topic] for count, topic in zip(counts, topics, strict=True)) / total,
        on_opposite=sum(count[opposite(topic)] for count, topic in zip(counts, topics, strict=True))
        / total,
        grammatical=sum(map(grammatical_share, stories)) / len(stories),
        ended=sum(ids[-1] == tokenizer.eos_token_id for ids in texts) / len(texts),
    )


def run_point(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    kind: str,
    negative: str,
    scale: float,
    num: int,
) -> list[list[int]]:
    """Sample `num` stories, evenly over the topics."""
    topics = [TOPIC_NAMES[i % len(TOPIC_NAMES)] for i in range(num)]
    conditional = Stream(model, [prompt_ids(tokenizer, kind, topic) for topic in topics])
    other = Stream(model, [negative_ids(tokenizer, kind, negative, topic) for topic in topics])
    return sample((conditional, other), scale, seed=0, eos=tokenizer.eos_token_id)


def print_table(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, args: argparse.Namespace
) -> None:
    print(
        "| prompt | negative | scale | on topic | on the negative's topic | grammatical | ended |"
    )
    print("|---|---|---|---|---|---|---|")
    for kind in args.kind:
        for negative in args.negative:
            for scale in args.scales:
                texts = run_point(model, tokenizer, kind, negative, scale, args.stories)
                point = measure_point(tokenizer, texts)
                cells = (f"{share:.1%}" for share in vars(point).values())
                print(
                    f"| {kind} | {negative} | {scale:g} | " + " | ".join(cells) + " |", flush=True
                )


# --- the draft ------------------------------------------------------------------------------------


@torch.inference_mode()
def agreement(
    models: tuple[PreTrainedModel, PreTrainedModel],
    tokenizer: PreTrainedTokenizerFast,
    scale: float,
    num: int,
) -> tuple[float, float]:
    """Draft against model on the model's own stories, both guided: equal top token; acceptance at
    temperature 1."""
    texts = run_point(models[0], tokenizer, "completion", "free", scale, num)
    equal, accepted, total = 0.0, 0.0, 0
    for i, ids in enumerate(texts):
        topic = TOPIC_NAMES[i % len(TOPIC_NAMES)]
        target, draft = (teacher_forced(model, tokenizer, topic, ids, scale) for model in models)
        equal += (target.argmax(-1) == draft.argmax(-1)).sum().item()
        accepted += torch.minimum(target, draft).sum().item()
        total += len(ids)
    return equal / total, accepted / total


def teacher_forced(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    topic: str,
    ids: list[int],
    scale: float,
) -> torch.Tensor:
    """[tokens, vocab]: the guided probabilities before each token of a story."""
    conditional, negative = (
        model(torch.tensor([prompt + ids[:-1]]))
        .logits[0, len(prompt) - 1 :]
        .float()
        .log_softmax(-1)
        for prompt in (
            prompt_ids(tokenizer, "completion", topic),
            prompt_ids(tokenizer, "completion", None),
        )
    )
    guided: torch.Tensor = negative + scale * (conditional - negative)
    return guided.softmax(-1)


def load(folder: Path, dtype: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--models", type=Path, default=MODELS, help="the folder of the model folders"
    )
    parser.add_argument("--stories", type=int, default=200, help="for each line")
    parser.add_argument(
        "--kind", nargs="*", default=["completion", "chat"], choices=["completion", "chat"]
    )
    parser.add_argument(
        "--negative", nargs="*", default=["free", "opposing"], choices=["free", "opposing", "last"]
    )
    parser.add_argument("--scales", nargs="*", type=float, default=[1.0, 1.5, 2.0, 3.0, 5.0])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--draft", action="store_true", help="also compare the draft model")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = load(args.models / "stories", args.dtype)
    tokenizer = AutoTokenizer.from_pretrained(args.models / "stories")
    print_table(model, tokenizer, args)
    if args.draft:
        draft = load(args.models / "stories-draft", args.dtype)
        for scale in (1.0, 3.0):
            top, accepted = agreement((model, draft), tokenizer, scale, 50)
            print(
                f"draft, scale {scale:g}: top token equal {top:.1%}, accepted at temperature 1"
                f" {accepted:.1%}"
            )


if __name__ == "__main__":
    main()
