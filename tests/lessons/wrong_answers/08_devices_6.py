# Exercise 3 is wrong: the devices are sorted, and not in the order in which they first come.
# The checker says: ranks_on(['cuda:1', 'cuda:0', 'cuda:1']): expected {'cuda:1': [0, 2], 'cuda:0': [1]}


def ranks_on(device_ids: list[str]) -> dict[str, list[int]]:
    return {each: [rank for rank, other in enumerate(device_ids) if other == each] for each in sorted(set(device_ids))}
