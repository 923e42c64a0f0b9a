"""What our source uses of other packages: read from the source, checked, and described.

vLLM's scheduler and runners are private, and change with every release. Nothing is listed by hand:
`reader.read(path, module)` finds every import, attribute, override and call of another package's
names in one of our files. `check.problems` tells which of them the installed packages do not have,
and `inventory.describe` writes down what each of them is, so that two versions can be compared
(scripts/versions/drift.py).
"""
