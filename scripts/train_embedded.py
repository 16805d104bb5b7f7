"""Train the embedded families and cut the embedded data, from the full Fashion-MNIST.

    apt-get install dataset-fashion-mnist        # or put the four .gz IDX files in a folder of your own
    python scripts/train_embedded.py fashion-bn  [--data DIR] [--epochs 15] [--threads 1]
    python scripts/train_embedded.py fashion-vit --epochs 25
    python scripts/train_embedded.py data

The families are trained on the 60,000 training images only; `data` keeps the first 4,000 test images.
"""

from __future__ import annotations

import argparse
import gzip
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mergetta.data.fashion import CLASSES, CLEAN_FILE, FILE
from mergetta.models.family import ARCHITECTURES, EMBEDDED, Family, Preprocessing
from mergetta.runtimes.home import with_home

SETTINGS = {"fashion-bn": ("small-resnet", 5e-3, 15), "fashion-vit": ("small-vit", 2e-3, 25)}
MEAN, STD = 0.286, 0.353  # of the training images


def read_idx(path: Path) -> np.ndarray:
    """An IDX file: two zero bytes, type, dimensions, sizes (big-endian), data."""
    raw = gzip.decompress(path.read_bytes())
    shape = np.frombuffer(raw, ">u4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


def augment(images: Tensor, generator: torch.Generator) -> Tensor:
    """Shift by up to two pixels, flip half of the images."""
    size = images.shape[-1]
    padded = F.pad(images, (2, 2, 2, 2))
    shifts = torch.randint(0, 5, (2, len(images)), generator=generator)
    steps = torch.arange(size)
    flip = torch.rand(len(images), generator=generator) < 0.5
    columns = torch.where(flip[:, None], steps.flip(0), steps) + shifts[1][:, None]
    rows = steps + shifts[0][:, None]
    index = torch.arange(len(images))[:, None, None]
    return padded[index, 0, rows[:, :, None], columns[:, None, :]][:, None]


def train(name: str, folder: Path, epochs: int | None) -> None:
    architecture, lr, default_epochs = SETTINGS[name]
    epochs = epochs or default_epochs
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    images = torch.from_numpy(read_idx(folder / "train-images-idx3-ubyte.gz").copy())[:, None]
    labels = torch.from_numpy(read_idx(folder / "train-labels-idx1-ubyte.gz").copy()).long()
    model = ARCHITECTURES[architecture]().to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr, weight_decay=0.05)
    batch = 200
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, epochs=epochs, steps_per_epoch=len(images) // batch)
    for epoch in range(epochs):
        model.train()
        total = 0.0
        for chosen in torch.randperm(len(images), generator=generator).split(batch):
            x = (augment(images[chosen].float() / 255, generator) - MEAN) / STD
            loss = F.cross_entropy(model(x), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach())
        print(f"{name} epoch {epoch + 1}/{epochs}: loss {total * batch / len(images):.4f}", flush=True)
    model.eval().to(memory_format=torch.contiguous_format)
    test = torch.from_numpy(read_idx(folder / "t10k-images-idx3-ubyte.gz").copy())[:, None].float() / 255
    truth = torch.from_numpy(read_idx(folder / "t10k-labels-idx1-ubyte.gz").copy()).long()
    with torch.inference_mode():
        correct = torch.cat([model((x - MEAN) / STD).argmax(1) for x in test.split(500)]) == truth
    print(
        f"{name}: clean accuracy {100 * correct.float().mean():.2f} % on the 10,000 test images, "
        f"{100 * correct[:4000].float().mean():.2f} % on the 4,000 embedded ones"
    )
    family = Family(name, model, Preprocessing((MEAN,), (STD,), 28), CLASSES, architecture)
    save_with_signature(family, images)


def save_with_signature(family: Family, images: Tensor) -> None:
    """Write the checkpoint, with the signature of 10,000 training images."""
    batches = (batch.float() / 255 for batch in images[:10_000].split(500))
    with_home(family, batches).save(EMBEDDED / f"{family.name}.safetensors")


def cut_data(folder: Path) -> None:
    """The first 4,000 test images and the first 2,000 training images, with their labels."""
    for file, part, count in ((FILE, "t10k", 4000), (CLEAN_FILE, "train", 2000)):
        images = read_idx(folder / f"{part}-images-idx3-ubyte.gz")[:count]
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz")[:count]
        np.savez_compressed(file, images=images, labels=labels)
        print(f"wrote {file.name}: {file.stat().st_size / 1e6:.2f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*SETTINGS, "data"])
    parser.add_argument("--data", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.what == "data":
        cut_data(arguments.data)
    else:
        train(arguments.what, arguments.data, arguments.epochs)


if __name__ == "__main__":
    main()
