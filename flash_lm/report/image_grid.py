"""Arranges images in a grid, and writes it as a PNG file."""

import pathlib

import numpy as np

_BORDER = 2  # pixels between images


def grid(images_NxHxWx: np.ndarray, columns: int) -> np.ndarray:
    """Arranges images in a grid, with white between them.

    Args:
        images_NxHxWx: uint8; N a multiple of `columns`.
        columns: images in a line.
    """
    rest = [(0, 0)] * (images_NxHxWx.ndim - 3)
    framed = np.pad(images_NxHxWx, [(0, 0), (0, _BORDER), (0, _BORDER), *rest], constant_values=255)
    count, height, width = framed.shape[:3]
    cells = framed.reshape(count // columns, columns, height, width, *framed.shape[3:])
    lines = np.swapaxes(cells, 1, 2).reshape(count // columns * height, columns * width, *framed.shape[3:])
    return np.pad(lines, [(_BORDER, 0), (_BORDER, 0), *rest], constant_values=255)


def write_png(path: pathlib.Path, image: np.ndarray) -> None:
    """Writes a grey or colour image; creates the folder if necessary."""
    import matplotlib.image  # noqa: PLC0415 (an extra, and slow to import)

    path.parent.mkdir(parents=True, exist_ok=True)
    matplotlib.image.imsave(path, image, cmap="gray", vmin=0, vmax=255)
