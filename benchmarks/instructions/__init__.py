"""What benchmarks/bench_instructions.py asks, how it judges answers, and how it counts.

`prompts` and `context` are the data. Both were written for this benchmark. `checkers` judge
answers, `fluency` measures what guidance may cost, `intervals` says how sure a share is, `answers`
keeps answers between runs, and `report` makes the tables. Only `fluency.Scorer` needs torch.
"""
