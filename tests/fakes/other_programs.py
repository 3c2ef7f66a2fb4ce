"""Other programs on the machine, as the benchmarks see them."""


class Others:
    """Stands in for the look at other programs: how many processors they use, look by look; the last one stays."""

    def __init__(self) -> None:
        self.looks: list[float] = [0.0]

    def __call__(self) -> float:
        return self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
