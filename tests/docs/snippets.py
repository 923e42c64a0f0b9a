"""The fenced blocks of the pages: where they are, and what is done with each kind.

    python -m tests.docs.snippets       counts them

curl      requests of the shell that this server answers: they are sent
client    Python with an openai client named `client`: it is run
program   other Python: it is run in a process of its own
yaml      checked by the checker of configurations
json      parsed
text      formulas, and what a program printed: nothing to check
command   other lines of the shell: what they name must exist (commands.py)
excepted  cannot be run; EXCEPTED says why. Its language is checked all the same
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "deploy/README.md",
    ROOT / "examples/README.md",
    ROOT / "models/README.md",
]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SHELL, KINDS = (
    ("sh", "bash"),
    ("curl", "client", "program", "yaml", "json", "command", "text"),
)

EXCEPTED = {
    ("docs/guidance.md", 'recipes.dexperts("polite"'): "needs two adapters of a model",
    (
        "docs/embeddings.md",
        "GTE-ModernColBERT",
    ): "needs its weights; tests/encoders/test_late_interaction.py runs the like",
    ("docs/ray-llm.md", "ray.data.llm"): "needs pandas; tests/serve/ray_llm runs the like",
    (
        "docs/recipes/thinking.md",
        "guidance_in",
    ): "asks the server of another model; tests/engine/test_reasoning.py sends the request",
    (
        "docs/digits.md",
        "fold -w 8",
    ): "asks the server of another model; tests/digits has its pictures",
}
"""Snippets that cannot be run, by page and a part of their text, with the reason."""


@dataclass(frozen=True)
class Snippet:
    """One fenced block.

    page: the path of its page in the repository.
    line: of its fence.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def kind(self) -> str:
        """One of KINDS, or "unclassified"."""
        if self.language in SHELL:
            return "curl" if re.search(r"^\s*curl ", self.text, re.MULTILINE) else "command"
        if self.language == "python":
            return "client" if re.search(r"\bclient\b", self.text) else "program"
        return self.language if self.language in ("yaml", "json", "text") else "unclassified"

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if it is."""
        found = [
            reason
            for (page, part), reason in EXCEPTED.items()
            if page == self.page and part in self.text
        ]
        return found[0] if found else None


def snippets_of(page: Path) -> list[Snippet]:
    text, name = page.read_text(encoding="utf-8"), str(page.relative_to(ROOT))
    return [
        Snippet(name, text.count("\n", 0, found.start()) + 1, found[1], found[2])
        for found in FENCE.finditer(text)
    ]


SNIPPETS = [snippet for page in PAGES for snippet in snippets_of(page)]


def of_kind(*kinds: str) -> list[Snippet]:
    """The snippets of these kinds, without those that are excepted."""
    return [x for x in SNIPPETS if x.kind in kinds and x.reason is None]


def counts() -> Counter[str]:
    return Counter("excepted" if x.reason else x.kind for x in SNIPPETS)


if __name__ == "__main__":
    print(f"{len(SNIPPETS)} snippets on {len({x.page for x in SNIPPETS})} pages")
    for kind, number in counts().most_common():
        print(f"{number:4} {kind}")
