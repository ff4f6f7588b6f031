"""A small vision transformer with QK-norm on CIFAR-100."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import require
from .base import Phase
from .cifar100 import CLASSES, SIDE, Cifar100
from .transformer import Layer, initialize, norm


class ViT(nn.Module):
    """Patches → layers → mean over the patches → classes; learned positions."""

    def __init__(self, *, layers: int, heads: int, width: int, patch: int) -> None:
        super().__init__()
        self.patch = patch
        self.embed = nn.Linear(3 * patch * patch, width)
        self.position = nn.Parameter(0.02 * torch.randn((SIDE // patch) ** 2, width))
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.classifier = nn.Linear(width, CLASSES)
        initialize(self.layers)

    def forward(self, x: Tensor) -> Tensor:  # [batch, 3, 32, 32] → [batch, classes]
        patches = F.unfold(x, self.patch, stride=self.patch).transpose(1, 2)
        x = self.embed(patches) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.classifier(norm(x).mean(1))


class Images(Cifar100):
    """The data, crops and flips of ``cifar100``; warm-up and a schedule, no averaged weights."""

    name = "vit"
    moment = 0.5

    def load(self) -> None:
        width, heads, patch = (self.options[k] for k in ("width", "heads", "patch"))
        require(width % heads == 0, f"width must be a multiple of heads, got {width} and {heads}")
        require(SIDE % patch == 0, f"patch must divide {SIDE}, got {patch}")
        super().load()

    def model(self) -> nn.Module:
        return ViT(**{k: self.options[k] for k in ("layers", "heads", "width", "patch")})

    def phase(self, epoch: int) -> Phase:
        return Phase(self.lr_factor(epoch), label_smoothing=self.options["smoothing"])


TASK = Images
