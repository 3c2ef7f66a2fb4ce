"""Lesson 1, scatter: a solution."""

import torch


def chunk_counts(rows: int, ranks: int) -> list[int]:
    """The rounded-down number for all, and one more for the first few."""
    small, remainder = divmod(rows, ranks)
    return [small + 1] * remainder + [small] * (ranks - remainder)


def scatter_rows(tensor: torch.Tensor, ranks: int, dim: int = 0) -> list[torch.Tensor]:
    """Views of the right sizes, each copied."""
    counts = [count for count in chunk_counts(tensor.size(dim), ranks) if count] or [0]
    return [
        part.clone(memory_format=torch.contiguous_format)
        for part in torch.split(tensor, counts, dim)
    ]


def scatter_batch(batch: dict[str, object], ranks: int) -> list[dict[str, object]]:
    """Checked first, then cut key by key, then turned from columns into rows."""
    cut = {
        key: value
        for key, value in batch.items()
        if isinstance(value, torch.Tensor) and value.dim()
    }
    first, *others = cut
    for other in others:
        if len(cut[other]) != len(cut[first]):
            raise ValueError(
                f"{first} has {len(cut[first])} rows, and {other} has {len(cut[other])}"
            )
    columns = {key: scatter_rows(value, ranks) for key, value in cut.items()}
    parts: list[dict[str, object]] = []
    for rank in range(len(columns[first])):
        whole = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in batch.items()
        }
        parts.append(
            {
                key: columns[key][rank] if key in columns else value
                for key, value in whole.items()
            }
        )
    return parts
