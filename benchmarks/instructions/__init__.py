"""Whether a small model follows instructions: the prompts, how answers are judged and counted.

`prompts` and `context` are the data. Both were written for this benchmark. `checkers` judge
answers, `fluency` measures what guidance may cost, `intervals` says how sure a share is, `answers`
keeps answers between runs, and `report` makes the tables. `__main__` runs it.
"""
