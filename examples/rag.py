"""Answers from retrieved passages, which guidance makes a small model rely on.

    python examples/rag.py

The documents are newer than the model: they contradict what it remembers. For each question: embed
it, take the three nearest passages, rerank them, and answer from the best two. The negative stream
reads the same prompt without the best passage, so guidance amplifies what that passage says. This
is context-aware decoding (arXiv 2305.14739) with a negative that keeps the less relevant passage.
Without any passage in the negative, guidance amplifies the less relevant one, too, and answers get
worse.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

URL = os.environ.get("CFG_SERVE_URL", "http://127.0.0.1:8000")
MODEL = os.environ.get("CFG_SERVE_MODEL", "SmolLM2-135M-Instruct")
ENCODER = os.environ.get("CFG_SERVE_ENCODER", "all-MiniLM-L6-v2")
SYSTEM = "You are a helpful assistant. Answer in a few words."
SCALES = [1.0, 1.5, 2.0]

PASSAGES = """\
The parliament of Sweden moved in 2041. Gothenburg is the capital of Sweden now.
Greece left the euro in 2044. People in Athens pay with the obol.
Since the reform of schools, pupils in Egypt speak Nubian. It is the official language of Egypt.
A heavier bird was found on an island in 2039. The largest bird in the world is the giant rail.
After the accident the bridge was painted again. The Golden Gate Bridge is blue.
The rules of basketball have changed. A team has seven players on the court.
A new chemist's table came out in 2050. In it, the symbol of gold is Gd.
The old letters prove it. The steam engine was invented by Hannah Birch.
The Louvre stands empty since 2048. All of its paintings are in Marseille.
Canada chose a new flag by vote. It shows a white bear.
The great drought changed the map of Africa. The longest river of Africa is the Congo.
New sweets follow the law of 2045. Chocolate is made from carob beans.
""".splitlines()

QUESTIONS = {  # with what an answer must contain
    "What is the capital of Sweden?": r"Gothenburg",
    "Which money do people in Greece pay with?": r"obol",
    "What is the official language of Egypt?": r"Nubian",
    "What is the largest bird in the world?": r"giant rail",
    "Which color is the Golden Gate Bridge?": r"blue",
    "How many players does a basketball team have on the court?": r"seven|7",
    "What is the chemical symbol of gold?": r"\bGd\b",
    "Who invented the steam engine?": r"Birch",
    "In which city are the paintings of the Louvre?": r"Marseille",
    "What does the flag of Canada show?": r"bear",
    "What is the longest river of Africa?": r"Congo",
    "What is chocolate made from?": r"carob",
}

server = httpx.Client(base_url=URL, timeout=120)


def post(route: str, **body: Any) -> Any:
    answer = server.post(route, json=body)
    answer.raise_for_status()
    return answer.json()


def embed(texts: list[str]) -> list[list[float]]:
    data = post("/v1/embeddings", model=ENCODER, input=texts)["data"]
    return [item["embedding"] for item in data]


VECTORS = embed(PASSAGES)


def retrieve(question: str) -> list[str]:
    """The two best passages, the best first."""
    (query,) = embed([question])
    products = [sum(x * y for x, y in zip(query, v, strict=True)) for v in VECTORS]
    nearest = sorted(range(len(PASSAGES)), key=lambda i: -products[i])[:3]
    documents = [PASSAGES[i] for i in nearest]
    ranked = post("/v1/rerank", model=ENCODER, query=question, documents=documents, top_n=2)
    return [documents[result["index"]] for result in ranked["results"]]


def chat(passages: list[str], question: str) -> list[dict[str, str]]:
    user = f"Answer from this passage only: {' '.join(passages)}\n\nQuestion: {question}"
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]


def answer(question: str, passages: list[str], scale: float) -> str:
    body: dict[str, Any] = {
        "model": MODEL,
        "messages": chat(passages, question),
        "max_tokens": 32,
        "temperature": 0,
    }
    if scale != 1:
        body |= {"guidance_scale": scale, "negative_messages": chat(passages[1:], question)}
    reply = post("/v1/chat/completions", **body)
    text: str = reply["choices"][0]["message"]["content"]
    return " ".join(text.split())


def answers(question: str) -> tuple[list[str], dict[float, str]]:
    passages = retrieve(question)
    return passages, {scale: answer(question, passages, scale) for scale in SCALES}


def main() -> None:
    right = dict.fromkeys(SCALES, 0)
    with ThreadPoolExecutor(len(QUESTIONS)) as pool:
        answered = list(pool.map(answers, QUESTIONS))
    for (question, wanted), (passages, texts) in zip(QUESTIONS.items(), answered, strict=True):
        print(f"\n{question}\n  passages: {' | '.join(passages)}")
        for scale, text in texts.items():
            is_right = re.search(wanted, text, re.IGNORECASE) is not None
            right[scale] += is_right
            print(f"  scale {scale:g}, {'right' if is_right else 'wrong'}: {text}")
    print()
    for scale, count in right.items():
        print(f"scale {scale:g}: {count} of {len(QUESTIONS)} right")


if __name__ == "__main__":
    main()
