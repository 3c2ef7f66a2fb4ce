"""Small models for the tests of the drop-in, at module level so that they can be pickled."""

import threading

import torch
from torch import nn


def cpu(ranks):
    """That many ranks on the CPU."""
    return ["cpu"] * ranks


def chunks(rows, ranks):
    """Rows per rank: sizes differ by at most one, the first ranks have more, nobody has none."""
    return [rows // ranks + (rank < rows % ranks) for rank in range(min(rows, ranks))]


def whole(module, seed=0):
    """Return the module with small whole numbers in its parameters: their sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator, device="cpu"))
    return module


def in_a_new_thread(work):
    """Does the work in a thread whose numbers of autograd nodes begin at zero, below those of threads that have worked.

    The engine runs nodes with higher numbers first, and each thread counts for itself: what stands first by accident in
    one thread does not in the other.
    """
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))


class Polynomial(nn.Module):
    """Whole numbers in, whole numbers out, and a second derivative."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 2), nn.Linear(2, 2)
        whole(self)

    def forward(self, x):
        return self.last(self.first(x) ** 2)


class Spy(nn.Module):
    """Notes who calls it with what.  Row ``i`` of its input is full of ``i``, so rows say which chunk came."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("offset", torch.ones(2))
        self.seen = []
        whole(self)

    def forward(self, x):
        self.seen.append(
            {
                "rows": x[:, 0].tolist(),
                "thread": threading.get_ident(),
                "weight": self.linear.weight.data_ptr(),
                "bias": self.linear.bias.data_ptr(),
                "leaf": id(self.linear.weight),
                "offset": self.offset.data_ptr(),
                "x": x.data_ptr(),
            }
        )
        return self.linear(x) + self.offset

    def by_rank(self):
        """Return the notes, in the order of their rows."""
        return sorted(self.seen, key=lambda note: note["rows"])


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.last = nn.Linear(3 * 4 * 4, 3)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.conv(x))).flatten(1))


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.last = nn.Linear(10, 3)

    def forward(self, x):
        return self.last(self.lstm(x)[0].mean(1))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.encoder(self.embedding(x)).mean(1))


class Tied(nn.Module):
    """One weight as embedding and as output layer."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x).sum(1))


class Embedded(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.embedding = nn.Embedding(6, 3, sparse=sparse)
        whole(self)

    def forward(self, x):
        return self.embedding(x)


class Scaled(nn.Parameter):
    """A parameter with a number of its own, as quantised weights have one."""

    def __new__(cls, data, scale):
        made = torch.Tensor._make_subclass(cls, data, True)
        made.scale = scale
        return made
