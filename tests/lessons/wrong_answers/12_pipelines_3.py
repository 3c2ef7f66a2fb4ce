# Exercise 1 is wrong: the actions are in the order of the stages, not of the slots.
# The checker says: gpipe(1, 2): expected


Action = tuple[int, int, str, int]


def gpipe(stages: int, chunks: int) -> list[Action]:
    end = 2 * (stages + chunks - 1) - 1
    found: list[Action] = []
    for stage in range(stages):
        for batch in range(chunks):
            found += [(stage + batch, stage, "F", batch), (end - stage - batch, stage, "B", batch)]
    return found
