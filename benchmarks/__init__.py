"""What things cost, and what guidance does: each benchmark is a module, run from the root.

    python -m benchmarks                    a short set (make bench)
    python -m benchmarks.engine.decode      one of them; its docstring says what it measures
    python -m benchmarks.tables             the results that are kept

- `engine`: steps, schedulers and memory of an engine in this process.
- `texts`: what guided engines generate and score, and what drafts give.
- `instructions`: whether a small model follows instructions.
- `real_size`: what large vocabularies and long prompts cost the host.
- `serving`, `routing`: the application over HTTP, and the choice of a replica.
- `embeddings`: encoders beside other engines.
- `plots`: draw what the others found.

Each prints a card (machine, versions, commit), a table, and one line of JSON (report.py).

Scripts know each other by bare names, so their folder is put on the path here.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "scripts"))
