"""Samples as bytes, grids of them, and the files of a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def to_uint8(images: Tensor) -> Tensor:
    """Images ``(n, c, h, w)`` in [-1, 1] as ``(n, h, w, c)`` uint8, truncated as is usual."""
    return ((images + 1) * 127.5).clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def image_grid(images: Tensor, columns: int | None = None, margin: int = 1) -> Tensor:
    """Tile ``(n, h, w, c)`` uint8 images to one ``(H, W, 3)`` uint8 picture."""
    count, height, width, channels = images.shape
    columns = columns or max(1, round(count**0.5))
    rows = -(-count // columns)
    colour = images[..., :1].expand(-1, -1, -1, 3) if channels < 3 else images[..., :3]
    tiles = torch.full((rows * columns, height + margin, width + margin, 3), 255, dtype=torch.uint8)
    tiles[:count, margin:, margin:] = colour.cpu()
    lines = tiles.reshape(rows, columns, *tiles.shape[1:]).transpose(1, 2).flatten(2, 3)
    lines = lines.flatten(0, 1)
    return functional.pad(lines, (0, 0, 0, margin, 0, margin), value=255)


def are_points(images: Tensor) -> bool:
    """Whether images ``(n, 1, 1, 2)`` are points of the plane."""
    return tuple(images.shape[1:]) == (1, 1, 2)


def shown_in_figure(images: Tensor) -> Tensor:
    """Samples ``(n, c, h, w)`` in [-1, 1] that a figure shows, as ``(m, h, w, c)`` uint8."""
    pixels = to_uint8(images[:1024])
    return (pixels if are_points(pixels) else pixels[:64]).cpu()


def grid_figure(images: Tensor, title: str) -> Figure:
    """Draw a grid of ``(n, h, w, c)`` uint8 images under a title; points as points."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4, 4.3))
    axes = figure.add_subplot()
    axes.set_title(title)
    if are_points(images):
        across, up = (images.flatten(1).double() / 127.5 - 1).T.numpy()
        axes.plot(across, up, ".", markersize=2)
        axes.set(xlim=(-1, 1), ylim=(-1, 1), aspect="equal")
        return figure
    axes.imshow(image_grid(images).numpy(), interpolation="nearest")
    axes.axis("off")
    return figure


def write_samples(folder: Path, images: Tensor, labels: Tensor | None) -> list[Path]:
    """Write ``samples.npz`` and a grid of the first 256 as ``samples.png``.

    Args:
        folder: Where.
        images: uint8 ``(n, h, w, c)``, ``arr_0`` of the file.
        labels: int64 ``(n,)``, ``arr_1`` of the file; None for none.

    Returns:
        The two paths.
    """
    import matplotlib.image

    arrays = {"arr_0": images.numpy()}
    if labels is not None:
        arrays["arr_1"] = labels.numpy()
    np.savez(folder / "samples.npz", **arrays)  # type: ignore[arg-type]
    if are_points(images):
        grid_figure(images, "").savefig(folder / "samples.png")
        return [folder / "samples.npz", folder / "samples.png"]
    # Tiny images are enlarged, so that the grid can be looked at.
    enlarge = max(1, 32 // images.shape[1])
    shown = images[:256].repeat_interleave(enlarge, 1).repeat_interleave(enlarge, 2)
    matplotlib.image.imsave(folder / "samples.png", image_grid(shown).numpy())
    return [folder / "samples.npz", folder / "samples.png"]
