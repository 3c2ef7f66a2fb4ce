# Exercise 2 is wrong: the order is lost.
# The checker says: cuda:0, 1, ... under mask_for([3, 1]) = '1,3': expected [3, 1], got [1, 3]


def mask_for(cards: list[int]) -> str:
    return ",".join(str(card) for card in sorted(cards)) or "-1"
