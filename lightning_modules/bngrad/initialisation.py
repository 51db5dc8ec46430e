"""Initial weights: Haar-orthogonal maps from one batched QR, and the Gaussian baselines."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["INITS", "haar_orthogonal", "initialise", "retract"]

INITS = ("orthogonal", "xavier_normal", "kaiming")


def haar_orthogonal(
    count: int,
    rows: int,
    columns: int,
    generator: torch.Generator | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws matrices uniformly (Haar) from the orthogonal, or semi-orthogonal, matrices.

    QR of Gaussian matrices, with the signs of R's diagonal moved into Q: without that step the
    result depends on the convention of LAPACK and is not uniform. All matrices share one batched
    call. Types below 32 bits are drawn in float32 and rounded.

    Args:
        count: Number of matrices.
        rows: Rows of each; orthonormal if not more than `columns`, else the columns are.
        columns: Columns of each.
        generator: Source of randomness, default the global one.
        dtype: Type of the result, default the global default type.
        device: Device of the result.

    Returns:
        `(count, rows, columns)`.
    """
    dtype = dtype or torch.get_default_dtype()
    working = dtype if dtype == torch.float64 else torch.float32
    long, short = max(rows, columns), min(rows, columns)
    gaussian = torch.randn(count, long, short, generator=generator, dtype=working, device=device)
    q = _signed_qr(gaussian)
    return (q if rows >= columns else q.mT).to(dtype)


def _signed_qr(x: Tensor) -> Tensor:
    """Q of the QR decomposition whose R has a positive diagonal, which makes it unique."""
    q, r = torch.linalg.qr(x)
    signs = r.diagonal(dim1=-2, dim2=-1).sign()
    unique: Tensor = q * torch.where(signs == 0, torch.ones_like(signs), signs)[..., None, :]
    return unique


def by_shape(layers: Sequence[nn.Linear]) -> list[list[nn.Linear]]:
    """Layers in groups of one weight shape."""
    groups: dict[tuple[int, ...], list[nn.Linear]] = {}
    for layer in layers:
        groups.setdefault(tuple(layer.weight.shape), []).append(layer)
    return list(groups.values())


@torch.no_grad()
def retract(layers: Sequence[nn.Linear]) -> None:
    """Replaces each weight by an orthogonal one close to it: the QR retraction, batched.

    Weights move by first order of their distance from the orthogonal matrices. Rectangular ones
    become semi-orthogonal.
    """
    for group in by_shape(layers):
        stacked = torch.stack([layer.weight for layer in group])
        working = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        wide = working.shape[-2] < working.shape[-1]
        q = _signed_qr(working.mT if wide else working)
        for layer, weight in zip(group, (q.mT if wide else q).to(stacked.dtype), strict=True):
            layer.weight.copy_(weight)


@torch.no_grad()
def initialise(
    layers: Sequence[nn.Linear],
    init: str,
    activation_gain: float,
    generator: torch.Generator | None = None,
) -> None:
    """Fills the weights of linear maps in place; biases keep the framework's uniform default.

    Args:
        layers: Maps in order. Those of one shape are drawn together.
        init: `orthogonal` (no gain), `xavier_normal` or `kaiming` (normal, fan-in), the latter two
            with the gain of the activation.
        activation_gain: The gain of the two Gaussian initialisations.
        generator: Source of randomness, default the global one.

    Raises:
        ValueError: If `init` is unknown.
    """
    if init not in INITS:
        raise ValueError(f"init must be one of {', '.join(INITS)}, got {init!r}")
    if init == "orthogonal":
        for group in by_shape(layers):
            rows, columns = group[0].weight.shape
            like = group[0].weight
            drawn = haar_orthogonal(len(group), rows, columns, generator, like.dtype, like.device)
            for layer, weight in zip(group, drawn, strict=True):
                layer.weight.copy_(weight)
        return
    for layer in layers:
        fan_out, fan_in = layer.weight.shape
        fan = (fan_in + fan_out) / 2 if init == "xavier_normal" else fan_in
        layer.weight.normal_(0.0, activation_gain / fan**0.5, generator=generator)
