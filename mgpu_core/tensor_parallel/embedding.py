"""An embedding cut by its vocabulary: each rank looks up its own tokens, and the ranks' rows are added."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import embedding as rows_of

from mgpu_core.comm.collectives import broadcast
from mgpu_core.devices.devices import DeviceLike
from mgpu_core.tensor_parallel.shards import Sharded, of_other_ranks

__all__ = ["ParallelEmbedding"]


class ParallelEmbedding(Sharded):
    """Look rows up as ``nn.Embedding`` does, with the vocabulary cut over the ranks.

    The initial values are those of an ``nn.Embedding`` with the same seed.  The ``state_dict`` has one tensor per rank:
    ``weights.0`` of shape ``(tokens of rank 0, embedding_dim)``, ``weights.1``, ... .

    Args:
        device_ids: one device per rank, as for :class:`mgpu_core.DataParallel`.
        padding_idx: the token whose row gets no gradient.

    Raises:
        TypeError, ValueError: a device that does not exist, or fewer tokens than ranks.
    """

    def __init__(
        self, num_embeddings: int, embedding_dim: int, device_ids: Sequence[DeviceLike],
        padding_idx: int | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self._take(nn.Embedding(num_embeddings, embedding_dim, padding_idx, dtype=dtype), device_ids)

    @classmethod
    def from_embedding(cls, embedding: nn.Embedding, device_ids: Sequence[DeviceLike]) -> ParallelEmbedding:
        """Return a layer with copies of the parts of an embedding.

        Raises:
            TypeError, ValueError: a module of another class; ``max_norm``, ``scale_grad_by_freq`` or ``sparse``.
        """
        layer = cls.__new__(cls)
        layer._take(embedding, device_ids)
        return layer

    def _take(self, embedding: nn.Embedding, device_ids: Sequence[DeviceLike]) -> None:
        self._build(embedding, nn.Embedding, 0, device_ids, "num_embeddings")
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option) not in (None, False):
                raise ValueError(f"an embedding with {option} cannot be cut over ranks")
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx = embedding.padding_idx

    def to_embedding(self) -> nn.Embedding:
        """Return an ``nn.Embedding`` with copies of the parameters, on the first device."""
        whole = nn.Embedding(self.num_embeddings, self.embedding_dim, self.padding_idx, device="meta")
        whole.weight = self._joined(self.weights)
        return whole

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of the tokens, ``(*tokens.shape, embedding_dim)``, on the first device.

        Args:
            tokens: int32 or int64, of any shape, on any device.

        Raises:
            TypeError: not a tensor of these dtypes.
            IndexError: a token outside the vocabulary; on a GPU torch's assertion on the device fails instead.
        """
        if not isinstance(tokens, torch.Tensor) or tokens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"tokens must be an int32 or int64 tensor, not {getattr(tokens, 'dtype', tokens)!r}")
        copies = broadcast(tokens.long(), self.device_ids)
        return self._summed([self._rows(rank, copy) for rank, copy in enumerate(copies)])

    def _rows(self, rank: int, tokens: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's tokens, and zeros for those of others."""
        start, end = sum(self.counts[:rank]), sum(self.counts[: rank + 1])
        elsewhere = of_other_ranks(tokens, self.counts, rank)
        padding = self.padding_idx
        own_padding = padding - start if padding is not None and start <= padding < end else None
        rows = rows_of((tokens - start).masked_fill(elsewhere, 0), self.weights[rank], own_padding)
        return rows.masked_fill(elsewhere.unsqueeze(-1), 0)

    def extra_repr(self) -> str:
        """Return the sizes and the devices."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, {self._devices_text()}"
