"""Images from a folder of files or from an `.npz` of bytes, for generative models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from datamodules.base import SuiteDataModule, split
from datamodules.images import ImageBatch
from lightning_modules.components.randomness import seed_from

__all__ = ["ImageFiles", "crop_and_resize", "image_paths"]

SUFFIXES = (".jpg", ".jpeg", ".png", ".gif")


def image_paths(folder: str | Path) -> list[Path]:
    """Sorted image files of a folder and all folders in it.

    Raises:
        FileNotFoundError: If the folder does not exist.
        ValueError: If it holds fewer than two images.
    """
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise FileNotFoundError(f"path={str(folder)!r} is no folder: give the folder of the images")
    paths = sorted(p for p in root.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file())
    if len(paths) < 2:
        raise ValueError(
            f"path={str(folder)!r} holds {len(paths)} images ({', '.join(SUFFIXES)}); "
            "at least 2 are needed"
        )
    return paths


def crop_and_resize(path: Path, size: int) -> npt.NDArray[np.uint8]:
    """Read one image as RGB: halve by box filter, then bicubic to the shorter side, centre crop.

    Args:
        path: Image file; of an animation the first frame.
        size: Side of the result.

    Returns:
        uint8 ``(size, size, 3)``.

    Raises:
        ValueError: If the file cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as opened:
            picture = opened.convert("RGB")
    except (UnidentifiedImageError, OSError) as error:
        raise ValueError(f"{path} cannot be read as an image: {error}") from error
    while min(picture.size) >= 2 * size:
        half = (picture.width // 2, picture.height // 2)
        picture = picture.resize(half, resample=Image.Resampling.BOX)
    scale = size / min(picture.size)
    target = (round(picture.width * scale), round(picture.height * scale))
    pixels = np.asarray(picture.resize(target, resample=Image.Resampling.BICUBIC))
    top, left = (pixels.shape[0] - size) // 2, (pixels.shape[1] - size) // 2
    return np.ascontiguousarray(pixels[top : top + size, left : left + size])


class ByteImages:
    """Byte images, read when asked for, as batches in [-1, 1].

    Args:
        images: Paths, or uint8 ``(size, h, w, 3)``.
        labels: int64 ``(size,)``.
        side: Side to which files are resized.
        flip: Mirror half of the images, anew in each epoch.
        seed: Of the flips.
    """

    def __init__(
        self,
        images: Sequence[Path] | npt.NDArray[np.uint8],
        labels: Tensor,
        side: int,
        flip: bool = False,
        seed: int = 0,
    ) -> None:
        self.images, self.labels = images, labels
        self.side, self.flip, self.seed, self.epoch = side, flip, seed, 0

    def __len__(self) -> int:
        return len(self.labels)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch, and with it which images are mirrored."""
        self.epoch = epoch

    def _bytes(self, index: int) -> npt.NDArray[np.uint8]:
        image = self.images[index]
        return crop_and_resize(image, self.side) if isinstance(image, Path) else image

    def __getitem__(self, indices: list[int]) -> ImageBatch:
        pixels = torch.from_numpy(np.stack([self._bytes(index) for index in indices]))
        x = pixels.permute(0, 3, 1, 2).float() / 127.5 - 1
        if self.flip:
            mirrored = torch.tensor(
                [seed_from(self.seed, "flip", self.epoch, index) & 1 for index in indices]
            )
            x = torch.where(mirrored.bool()[:, None, None, None], x.flip(3), x)
        return ImageBatch(x.contiguous(), self.labels[torch.as_tensor(indices)])


class ImageFiles(SuiteDataModule):
    """RGB images of one size in [-1, 1]; a batch is `ImageBatch(x (n, 3, s, s), y (n,))`.

    | source | data | where from |
    | --- | --- | --- |
    | `synthetic` | 512 images 3 x 16 x 16 of coloured discs and bars | made with a fixed seed |
    | `folder` | jpg, jpeg, png, gif, recursively | the folder `path` |
    | `npz` | `arr_0` uint8 (n, h, w, 3), optionally `arr_1` labels | the file `path` |

    Args:
        source: `synthetic`, `folder` or `npz`.
        path: Folder or file.
        image_size: Side; files are halved by a box filter, resized (bicubic) and centre-cropped.
            An `.npz` must have it already.
        labels: `none` (all 0), `file_name` (the part before the first `_`) or `folder_name`; an
            `.npz` has its own.
        flip: Mirror training images with probability 1/2.
        val_fraction: Share of images for validation and testing. 0 validates and tests on the
            training images (generative models are compared with the set they were trained on).
        batch_size: Images per batch **and device**.
        seed: Seed of split, order and flips.
        num_workers: Worker processes of each loader; files need some.
        cache_dir: Not used.
        sampling: How training batches are drawn.

    Raises:
        ValueError: If an argument is out of range.
    """

    sources = ("synthetic", "folder", "npz")

    def __init__(
        self,
        source: str = "synthetic",
        path: str | None = None,
        image_size: int = 16,
        labels: Literal["none", "file_name", "folder_name"] = "none",
        flip: bool = False,
        val_fraction: float = 0.1,
        batch_size: int = 32,
        seed: int = 0,
        num_workers: int = 0,
        cache_dir: str | None = None,
        sampling: str = "shuffle",
    ) -> None:
        super().__init__(source, batch_size, seed, num_workers, cache_dir, sampling)
        if image_size < 1:
            raise ValueError(f"image_size must be at least 1, got {image_size}")
        if not 0 <= val_fraction < 1:
            raise ValueError(f"val_fraction must be in [0, 1), got {val_fraction}")
        if source != "synthetic" and path is None:
            raise ValueError(f"source '{source}' needs path: give its folder or file")
        self.path, self.image_size, self.labels = path, image_size, labels
        self.flip, self.val_fraction = flip, val_fraction
        self.sample_shape = (3, image_size, image_size)
        self.class_names: list[str] = []
        self.n_classes = 0

    def setup(self, stage: str) -> None:
        """List or read the images and split them; the same on every rank."""
        if self.train_set is not None:
            return
        images, names = self._images()
        if isinstance(names, Tensor):
            labels = names
            self.class_names = [str(n) for n in range(int(labels.max()) + 1)]
        else:
            self.class_names, codes = _codes(names)
            labels = torch.from_numpy(codes)
        self.n_classes = len(self.class_names)
        everything = torch.arange(len(labels))
        train, held_out = everything, everything
        if self.val_fraction:
            train, held_out = split(len(labels), [1 - self.val_fraction], self.seed)
        self.train_set = self._part(images, labels, train, self.flip)
        self.val_set = self.test_set = self._part(images, labels, held_out, False)

    def _part(
        self,
        images: list[Path] | npt.NDArray[np.uint8],
        labels: Tensor,
        rows: Tensor,
        flip: bool,
    ) -> ByteImages:
        chosen: list[Path] | npt.NDArray[np.uint8]
        if isinstance(images, list):
            chosen = [images[row] for row in rows.tolist()]
        else:
            chosen = images[rows.numpy()]
        return ByteImages(chosen, labels[rows], self.image_size, flip, self.seed)

    def _images(self) -> tuple[list[Path] | npt.NDArray[np.uint8], list[str] | Tensor]:
        if self.source == "synthetic":
            return synthetic_images(512, self.image_size)
        assert self.path is not None
        if self.source == "npz":
            return self._npz(Path(self.path).expanduser())
        paths = image_paths(self.path)
        if self.labels == "file_name":
            return paths, [path.name.split("_")[0] for path in paths]
        if self.labels == "folder_name":
            return paths, [path.parent.name for path in paths]
        return paths, [""] * len(paths)

    def _npz(self, path: Path) -> tuple[npt.NDArray[np.uint8], Tensor]:
        if not path.is_file():
            raise FileNotFoundError(f"path={str(path)!r} does not exist: give an .npz file")
        with np.load(path) as arrays:
            if "arr_0" not in arrays:
                kind = " (these are reference statistics)" if "mu" in arrays else ""
                raise ValueError(
                    f"{path} holds {', '.join(arrays.files)}{kind}; "
                    "images are expected as arr_0, uint8 (n, h, w, 3)"
                )
            images = arrays["arr_0"]
            labels = arrays["arr_1"] if "arr_1" in arrays else np.zeros(len(images), np.int64)
        side = self.image_size
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise ValueError(
                f"{path}: arr_0 must be uint8 (n, h, w, 3), got {images.dtype} {images.shape}"
            )
        if images.shape[1:3] != (side, side):
            raise ValueError(
                f"{path}: images are {images.shape[1]} x {images.shape[2]}, "
                f"image_size is {side}: set it to match"
            )
        if len(images) < 2 or len(labels) != len(images):
            raise ValueError(f"{path}: {len(images)} images and {len(labels)} labels")
        return images, torch.from_numpy(labels.astype(np.int64))


def _codes(names: list[str]) -> tuple[list[str], npt.NDArray[np.int64]]:
    unique, codes = np.unique(np.array(names), return_inverse=True)
    return unique.tolist(), codes.astype(np.int64)


def synthetic_images(count: int, side: int, seed: int = 0) -> tuple[npt.NDArray[np.uint8], Tensor]:
    """Discs (class 0) and bars (class 1) of random colour and place on a grey ground.

    Returns:
        uint8 ``(count, side, side, 3)`` and int64 ``(count,)``.
    """
    random = np.random.RandomState(seed)
    rows, columns = np.mgrid[:side, :side]
    images = np.full((count, side, side, 3), 128, dtype=np.uint8)
    labels = np.arange(count) % 2
    for number in range(count):
        top, left = random.uniform(0.3, 0.7, 2) * side
        extent = random.uniform(0.15, 0.3) * side
        inside = (
            (rows - top) ** 2 + (columns - left) ** 2 <= extent**2
            if labels[number] == 0
            else np.abs(columns - left) <= extent / 3
        )
        images[number][inside] = random.randint(0, 256, 3)
    return images, torch.from_numpy(labels.astype(np.int64))
