# Exercise 3 is wrong: a device that comes twice has its last rank only.
# The checker says: ranks_on(['cuda:0', 'cuda:0']): ['cuda:0']: expected [0, 1], got [1]


def ranks_on(device_ids: list[str]) -> dict[str, list[int]]:
    return {device: [rank] for rank, device in enumerate(device_ids)}
