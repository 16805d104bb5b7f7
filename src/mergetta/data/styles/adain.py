"""Adaptive instance normalisation (Huang & Belongie 2017), the style transfer behind Stylized-ImageNet.

The networks have the layout of the public weight files of pytorch-AdaIN, `vgg_normalised.pth` (VGG-19, of which the
part up to relu4_1 is used) and `decoder.pth`: state dicts of plain sequences, with the number of the layer as key.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from mergetta.errors import MergettaError
from mergetta.models.checkpoints import fit, read_tensors

SMALLEST_SIZE = 16  # below it, there is nothing to mirror at the borders of the innermost features


class AdaIN:
    """Stylises images with an encoder and its decoder.

    >>> AdaIN.load("vgg_normalised.pth", "decoder.pth")(images, style, alpha=1.0)  # doctest: +SKIP
    """

    def __init__(self, encode: nn.Module, decode: nn.Module, device: str = "cpu") -> None:
        self.encode = encode.to(device).eval()
        self.decode = decode.to(device).eval()
        self.device = device

    @classmethod
    def load(cls, encoder_file: str | Path, decoder_file: str | Path, device: str = "cpu") -> AdaIN:
        encode, decode = encoder(), decoder()
        load_layers(encode, encoder_file)
        load_layers(decode, decoder_file)
        return cls(encode, decode, device)

    @torch.inference_mode()
    def __call__(self, images: NDArray[np.uint8], style: NDArray[np.uint8], alpha: float = 1.0) -> NDArray[np.uint8]:
        """uint8 images (N, H, W, 3) in the style of a painting (H, W, 3).

        `alpha` is the share of the renormalised features in the ones decoded; at 0 they are the image's own.
        One image at a time: convolutions round differently in batches of different sizes, and an image must not
        depend on its batch.
        """
        check(images, style, alpha)
        painting = self.encode(self.as_input(style))
        result = np.empty_like(images)
        for i, image in enumerate(images):
            own = self.encode(self.as_input(image))
            mixed = alpha * renormalised(own, painting) + (1 - alpha) * own
            pixels = self.decode(mixed)[0, :, : image.shape[0], : image.shape[1]].clamp(0, 1)
            result[i] = (pixels * 255).round().byte().permute(1, 2, 0).numpy(force=True)
        return result

    def as_input(self, image: NDArray[np.uint8]) -> Tensor:
        """One image as the batch of one that the encoder takes."""
        return torch.from_numpy(image.astype(np.float32) / 255).permute(2, 0, 1)[None].to(self.device)


def renormalised(content: Tensor, style: Tensor) -> Tensor:
    """The content's features (N, C, H, W) with the mean and the standard deviation of the style's, per channel."""
    variance, mean = torch.var_mean(content, dim=(2, 3), keepdim=True)
    style_variance, style_mean = torch.var_mean(style, dim=(2, 3), keepdim=True)
    return (content - mean) / (variance + 1e-5).sqrt() * (style_variance + 1e-5).sqrt() + style_mean


def check(images: NDArray[np.uint8], style: NDArray[np.uint8], alpha: float) -> None:
    for name, pixels, axes in (("Images", images, 4), ("A style", style, 3)):
        size = min(pixels.shape[-3:-1], default=0)
        if pixels.ndim != axes or pixels.shape[-1] != 3 or pixels.dtype != np.uint8 or size < SMALLEST_SIZE:
            raise MergettaError(
                f"{name} for AdaIN must be uint8, in colour, of at least {SMALLEST_SIZE}×{SMALLEST_SIZE} pixels, "
                f"not {pixels.dtype} {pixels.shape}."
            )
    if not 0 <= alpha <= 1:
        raise MergettaError(f"alpha must be between 0 and 1, not {alpha}.")


def encoder() -> nn.Sequential:
    """VGG-19 up to relu4_1, its first layer a change of colours."""
    layers: list[nn.Module] = [nn.Conv2d(3, 3, 1)]
    inputs = 3
    for width in (64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512):
        if width:
            layers += [nn.ReflectionPad2d(1), nn.Conv2d(inputs, width, 3), nn.ReLU()]
            inputs = width
        else:
            layers.append(nn.MaxPool2d(2, ceil_mode=True))
    return nn.Sequential(*layers)


def decoder() -> nn.Sequential:
    """The encoder mirrored, enlargement in the place of pooling."""
    layers: list[nn.Module] = []
    inputs = 512
    for width in (256, 0, 256, 256, 256, 128, 0, 128, 64, 0, 64, 3):
        if width:
            layers += [nn.ReflectionPad2d(1), nn.Conv2d(inputs, width, 3), nn.ReLU()]
            inputs = width
        else:
            layers.append(nn.Upsample(scale_factor=2, mode="nearest"))
    return nn.Sequential(*layers[:-1])


def load_layers(network: nn.Sequential, file: str | Path) -> None:
    """Fill a network from a file; VGG's layers behind the network's last one are not needed."""
    tensors = {key: tensor for key, tensor in read_tensors(file).items() if not behind(key, len(network))}
    fit(network, tensors, str(file))


def behind(key: str, layers: int) -> bool:
    number = key.partition(".")[0]
    return number.isdecimal() and int(number) >= layers
