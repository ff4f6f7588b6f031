"""The parameter shapes of the networks the benchmark speaks of."""

from __future__ import annotations

Shape = tuple[int, ...]


def resnet18(classes: int = 100) -> list[Shape]:
    """ResNet-18 with a 3×3 stem: 62 tensors, 11.2 M parameters."""
    shapes: list[Shape] = [(64, 3, 3, 3), (64,), (64,)]
    inside = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, inside, 3, 3), (width,), (width,)]
            shapes += [(width, width, 3, 3), (width,), (width,)]
            if block == 0 and inside != width:
                shapes += [(width, inside, 1, 1), (width,), (width,)]
            inside = width
    return [*shapes, (classes, 512), (classes,)]


def gpt(layers: int, width: int, vocabulary: int = 50257, context: int = 1024) -> list[Shape]:
    """GPT-2: tied embeddings, biases, two LayerNorms a layer."""
    shapes: list[Shape] = [(vocabulary, width), (context, width)]
    for _ in range(layers):
        shapes += [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
        shapes += [
            (width,),
            (width,),
            (4 * width, width),
            (4 * width,),
            (width, 4 * width),
            (width,),
        ]
    return [*shapes, (width,), (width,)]


NETWORKS = {
    "resnet18": resnet18(),
    "gpt-124m": gpt(12, 768),
    "gpt-350m": gpt(24, 1024),
    "gpt-1.3b": gpt(24, 2048),
    "200-small": [(64, 48), (64,)] * 100,
}
