"""The parameter shapes of the networks the benchmark speaks of."""

from __future__ import annotations

Shape = tuple[int, ...]


class Turning(tuple[int, ...]):
    """The shape of a weight whose scale cannot matter: AngularAdamW turns it."""


def resnet18(classes: int = 100) -> list[Shape]:
    """ResNet-18 with a 3×3 stem: 62 tensors, 11.2 M parameters; BatchNorm follows convolutions."""
    shapes: list[Shape] = [Turning((64, 3, 3, 3)), (64,), (64,)]
    inside = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [Turning((width, inside, 3, 3)), (width,), (width,)]
            shapes += [Turning((width, width, 3, 3)), (width,), (width,)]
            if block == 0 and inside != width:
                shapes += [Turning((width, inside, 1, 1)), (width,), (width,)]
            inside = width
    return [*shapes, (classes, 512), (classes,)]


def gpt(layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    """GPT-2 with QK-norm: tied embeddings, q, k, v apart, a gain before each part of a layer."""
    shapes: list[Shape] = [(vocabulary, width), (context, width)]
    square = (width, width)
    for _ in range(layers):
        shapes += [(width,), Turning(square), Turning(square), square, square]
        shapes += [(width,), (4 * width, width), (width, 4 * width)]
    return [*shapes, (width,)]


NETWORKS = {
    "resnet18": resnet18(),
    "gpt-124m": gpt(12, 768),
    "gpt-350m": gpt(24, 1024),
    "gpt-1.3b": gpt(24, 2048),
    "200-small": [(64, 48), (64,)] * 100,
}
