"""What guided engines generate and score, and what drafts give.

Importing this package sets variables that torch and vLLM read when they are imported.
"""

from ..llm import set_environment

set_environment()
