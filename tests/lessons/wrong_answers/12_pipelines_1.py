# Exercise 1 is wrong: the backwards come in the order of the forwards, so the first micro-batch goes back first.
# The checker says: gpipe(1, 2): expected


Action = tuple[int, int, str, int]


def gpipe(stages: int, chunks: int) -> list[Action]:
    begin, last = chunks + stages - 1, stages - 1
    actions = [(stage + batch, stage, "F", batch) for stage in range(stages) for batch in range(chunks)]
    actions += [(begin + last - stage + batch, stage, "B", batch) for stage in range(stages) for batch in range(chunks)]
    return sorted(actions)
