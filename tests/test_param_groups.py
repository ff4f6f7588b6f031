"""What param_groups finds: each verdict is held against the definition, by rescaling weights."""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import random
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from adamo_optim import param_groups, scale_invariance
from adamo_optim.rules import Rule
from adamo_optim.scale_invariance import (
    EPS_MATTERS,
    HARDLY_VARIES,
    NO_GRADIENT,
    NOT_FINITE,
    SCALE_DEPENDENT,
    SCALE_INVARIANT,
)

WIDTH = 16


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield
    assert torch.get_default_dtype() == torch.float32


# What is asked and what is true


def rules(groups: list[dict[str, Any]]) -> dict[str, str]:
    return {name: group["rule"] for group in groups for name, _ in group["params"]}


def verdicts(groups: list[dict[str, Any]]) -> dict[str, Rule]:
    return {name: Rule(*group["found"]) for group in groups for name, _ in group["params"]}


def with_rule(groups: list[dict[str, Any]], rule: str) -> set[str]:
    return {name for name, found in rules(groups).items() if found == rule}


def flatten(result: Any) -> Tensor:
    tensors = [result] if isinstance(result, Tensor) else list(result)
    return torch.cat([t.flatten().double() for t in tensors])


@torch.no_grad()
def unmoved_by_rescaling(model: nn.Module, *batch: Tensor) -> set[str]:
    """Names of the matrices w with f(2w) = f(w): the definition, with no gradient involved."""
    model = copy.deepcopy(model).double().train()
    for module in model.modules():
        for name in ("eps", "variance_epsilon", "epsilon"):
            if hasattr(module, name):
                setattr(module, name, 1e-20)
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=0.1)
    batch = tuple(t.double() if t.is_floating_point() else t for t in batch)

    def output() -> Tensor:
        torch.manual_seed(1)  # the same dropout masks
        return flatten(model(*batch))

    before, unmoved = output(), set()
    for name, parameter in model.named_parameters():
        parameter.mul_(2.0)
        # Doubling is exact, so that even half precision inside the model adds no rounding.
        if parameter.dim() > 1 and torch.allclose(before, output(), rtol=1e-5, atol=1e-7):
            unmoved.add(name)
        parameter.div_(2.0)
    return unmoved


# Models


class ResNet(nn.Module):
    """Two residual blocks, the last gamma of each zero, as in the usual ImageNet recipe."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), norm(8), nn.ReLU())
        self.blocks = nn.ModuleList()
        self.shortcuts = nn.ModuleList()
        for fan_in, fan_out in ((8, 8), (8, 12)):
            last = norm(fan_out)
            nn.init.zeros_(last.get_parameter("weight"))
            first = [nn.Conv2d(fan_in, fan_out, 3, padding=1, bias=False), norm(fan_out), nn.ReLU()]
            second = [nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False), last]
            self.blocks.append(nn.Sequential(*first, *second))
            shortcut = nn.Sequential(nn.Conv2d(fan_in, fan_out, 1, bias=False), norm(fan_out))
            self.shortcuts.append(nn.Identity() if fan_in == fan_out else shortcut)
        self.classifier = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block, shortcut in zip(self.blocks, self.shortcuts, strict=True):
            x = F.relu(block(x) + shortcut(x))
        return self.classifier(x.mean((2, 3)))


class LlamaNorm(nn.Module):
    """RMSNorm as in Llama: in float32 whatever comes in."""

    def __init__(self, width: int, to_float32: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.variance_epsilon = 1e-6
        self.to_float32 = to_float32

    def forward(self, x: Tensor) -> Tensor:
        wide = self.to_float32(x)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(x.dtype)


class NanoNorm(nn.Module):
    """LayerNorm as in nanoGPT: the eps is a literal in a functional call."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], None, None, 1e-5)


class FunctionalRMSNorm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],))


class EpsilonNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.epsilon = 1e-3

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + self.epsilon).sqrt()


class Attention(nn.Module):
    def __init__(self, qk_norm: Callable[[], nn.Module] | None) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.q_norm = qk_norm() if qk_norm else nn.Identity()
        self.k_norm = qk_norm() if qk_norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        heads = [layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k)]
        q, k = self.q_norm(heads[0]), self.k_norm(heads[1])
        v = self.v(x).unflatten(-1, (2, -1)).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).mT.flatten(1, 2).mT)


class Transformer(nn.Module):
    """Pre-norm, with normalized token embeddings and positions added to them."""

    def __init__(
        self,
        norm: Callable[[int], nn.Module],
        qk_norm: Callable[[], nn.Module] | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, WIDTH)
        self.token_norm = norm(WIDTH)
        self.positions = nn.Embedding(6, WIDTH)
        self.attention_norm, self.mlp_norm, self.last_norm = (norm(WIDTH) for _ in range(3))
        self.attention = Attention(qk_norm)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, WIDTH)
        )
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token_norm(self.tokens(tokens)) + self.positions.weight[: tokens.shape[1]]
        x = x + self.attention(self.attention_norm(x))
        x = x + self.mlp(self.mlp_norm(x))
        return self.head(self.last_norm(x))


def linear_chain(norm: nn.Module, **linear_options: Any) -> nn.Module:
    """Scale-invariant up to the norm as long as there is no bias."""
    first, second = (nn.Linear(WIDTH, WIDTH, **linear_options) for _ in range(2))
    return nn.Sequential(first, nn.ReLU(), second, norm, nn.Dropout(0.3), nn.Linear(WIDTH, 4))


def images() -> Tensor:
    return torch.randn(4, 3, 6, 6)


def tokens() -> Tensor:
    return torch.randint(0, 11, (3, 6))


def vectors() -> Tensor:
    return torch.randn(6, WIDTH)


CONVOLUTIONS = {
    "stem.0.weight",
    *(f"blocks.{i}.{j}.weight" for i in (0, 1) for j in (0, 3)),
    "shortcuts.1.0.weight",
}
TOKENS = {"tokens.weight"}
QUERIES_AND_KEYS = {"attention.q.weight", "attention.k.weight"}
CHAIN = {"0.weight", "2.weight"}
NO_BIAS = {"bias": False}

CASTS: dict[str, Callable[[Tensor], Tensor]] = {
    "float": lambda x: x.float(),
    "to": lambda x: x.to(torch.float32),
    "to_keyword": lambda x: x.to(dtype=torch.float32),
    "type": lambda x: x.type(torch.float32),
    "reduction": lambda x: x.unsqueeze(-1).sum(-1, dtype=torch.float32),
    "half": lambda x: x.half(),
    "bfloat16": lambda x: x.bfloat16(),
    "float32_factory": lambda x: torch.zeros(x.shape, dtype=torch.float32).copy_(x),
    "complex64": lambda x: x.to(torch.complex64).real,
}

# id: model, batch, its scale-invariant weights
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], set[str]]] = {
    "resnet-batchnorm": (lambda: ResNet(nn.BatchNorm2d), images, CONVOLUTIONS),
    "resnet-groupnorm": (lambda: ResNet(lambda c: nn.GroupNorm(2, c)), images, CONVOLUTIONS),
    "resnet-instancenorm": (
        lambda: ResNet(lambda c: nn.InstanceNorm2d(c, affine=True)),
        images,
        CONVOLUTIONS,
    ),
    "transformer-layernorm": (lambda: Transformer(nn.LayerNorm), tokens, TOKENS),
    "transformer-rmsnorm": (lambda: Transformer(nn.RMSNorm), tokens, TOKENS),
    "transformer-tied": (lambda: Transformer(nn.LayerNorm, tied=True), tokens, set()),
    "transformer-qk-norm": (
        lambda: Transformer(nn.RMSNorm, lambda: nn.RMSNorm(8, eps=1e-6)),
        tokens,
        TOKENS | QUERIES_AND_KEYS,
    ),
    "transformer-qk-norm-tied": (
        lambda: Transformer(nn.LayerNorm, lambda: nn.LayerNorm(8), tied=True),
        tokens,
        QUERIES_AND_KEYS,
    ),
    **{
        f"llama-norm-{name}": (
            lambda cast=cast: Transformer(lambda width: LlamaNorm(width, cast)),
            tokens,
            TOKENS,
        )
        for name, cast in CASTS.items()
    },
    "chain-no-bias": (lambda: linear_chain(nn.LayerNorm(WIDTH), **NO_BIAS), vectors, CHAIN),
    "chain-bias": (lambda: linear_chain(nn.LayerNorm(WIDTH)), vectors, set()),
    "chain-batchnorm": (lambda: linear_chain(nn.BatchNorm1d(WIDTH), **NO_BIAS), vectors, CHAIN),
    "other-peoples-norm": (lambda: linear_chain(EpsilonNorm(), **NO_BIAS), vectors, CHAIN),
    "no-norm": (lambda: linear_chain(nn.Identity(), **NO_BIAS), vectors, set()),
    "weight-norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 4)),
        vectors,
        {"parametrizations.weight.original1"},
    ),
}


@pytest.mark.parametrize(("build", "batch", "expected"), MODELS.values(), ids=MODELS)
def test_scale_invariant_weights_are_those_that_rescaling_does_not_move(
    build: Callable[[], nn.Module], batch: Callable[[], Tensor], expected: set[str]
) -> None:
    model, example = build(), batch()
    assert unmoved_by_rescaling(model, example) == expected
    found = rules(param_groups(model, example))
    matrices = {name for name, p in model.named_parameters() if p.dim() > 1}
    assert {name for name, rule in found.items() if rule == "scale_invariant"} == expected
    assert {name for name, rule in found.items() if rule == "general"} == matrices - expected
    assert {name for name, rule in found.items() if rule == "low_dim"} == found.keys() - matrices


layers = st.tuples(
    st.booleans(),
    st.sampled_from(["none", "layer", "batch", "rms"]),
    st.sampled_from([nn.ReLU, nn.Tanh, nn.Identity]),
)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(layers, min_size=1, max_size=4), st.integers(0, 10_000))
def test_random_chains_agree_with_rescaling(
    chain: list[tuple[bool, str, type[nn.Module]]], seed: int
) -> None:
    torch.manual_seed(seed)
    norms = {"layer": nn.LayerNorm, "batch": nn.BatchNorm1d, "rms": nn.RMSNorm}
    modules: list[nn.Module] = []
    for bias, norm, activation in chain:
        modules += [nn.Linear(WIDTH, WIDTH, bias=bias), norms.get(norm, nn.Identity)(WIDTH)]
        modules.append(activation())
    model, batch = nn.Sequential(*modules, nn.Linear(WIDTH, 3)), vectors()
    found = with_rule(param_groups(model, batch), "scale_invariant")
    assert found == unmoved_by_rescaling(model, batch)


@pytest.mark.parametrize("norm", [NanoNorm, FunctionalRMSNorm])
def test_functional_norms_count_too(norm: type[nn.Module]) -> None:
    groups = param_groups(linear_chain(norm(), **NO_BIAS), vectors())
    assert with_rule(groups, "scale_invariant") == CHAIN


@pytest.mark.parametrize("std", [1.0, 1e-2, 1e-4], ids=str)
def test_small_features_stay_above_the_negligible_eps(std: float) -> None:
    model = linear_chain(nn.RMSNorm(WIDTH, eps=1e-14), **NO_BIAS)
    nn.init.normal_(model.get_parameter("2.weight"), std=std)
    assert with_rule(param_groups(model, vectors()), "scale_invariant") == CHAIN


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.RMSNorm, lambda _: NanoNorm()])
@pytest.mark.parametrize("small", ["input", "weight"])
def test_features_that_do_not_exceed_the_eps_depend_on_the_scale(
    norm: Callable[[int], nn.Module], small: str
) -> None:
    model, batch = linear_chain(norm(WIDTH), **NO_BIAS), vectors()
    assert with_rule(param_groups(model, batch), "scale_invariant") == CHAIN
    if small == "input":
        batch *= 3e-4
    else:
        nn.init.normal_(model.get_parameter("2.weight"), std=1e-5)
    found = verdicts(param_groups(model, batch))
    assert {found[name] for name in CHAIN} == {EPS_MATTERS}


@pytest.mark.parametrize("shape", [(16, 16), (16, 8), (8, 16)], ids=str)
def test_what_holds_only_where_training_starts_is_not_invariance(shape: tuple[int, int]) -> None:
    """At −I, where torch starts it, the gradient of an orthogonal weight has no diagonal."""
    layer = nn.utils.parametrizations.orthogonal(nn.Linear(*shape, bias=False))
    groups = param_groups(layer, torch.randn(32, shape[0]))
    assert with_rule(groups, "scale_invariant") == set()


def test_positive_parameters_stay_positive() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, 3)
            self.norm = nn.LayerNorm(8)
            self.variance = nn.Parameter(torch.logspace(-6, 2, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x)) / self.variance.sqrt())

    assert rules(param_groups(Scaled(), vectors()))["first.weight"] == "scale_invariant"


def test_features_without_variance_do_no_harm() -> None:
    embedding = nn.Embedding(11, WIDTH, padding_idx=0)
    model = nn.Sequential(
        embedding, nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
    )
    batch = torch.tensor([[0, 0, 3, 4, 5], [0, 1, 7, 8, 9]])  # LayerNorm sees exact zeros
    found = rules(param_groups(model, batch))
    assert found["0.weight"] == found["1.weight"] == "scale_invariant"
    assert found["3.weight"] == "general"


@pytest.mark.parametrize("constant", [0.0, 0.1])
def test_a_constant_bias_before_layer_norm_hides_nothing(constant: float) -> None:
    # LayerNorm takes a constant bias out, so at initialization W looks scale-invariant.
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    nn.init.constant_(model.get_parameter("0.bias"), constant)
    groups = param_groups(model, vectors())
    assert verdicts(groups)["0.weight"] == SCALE_DEPENDENT


def test_lora_with_b_zero_is_examined() -> None:
    class LoRA(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
            self.a = nn.Linear(WIDTH, 2, bias=False)
            self.b = nn.Linear(2, WIDTH, bias=False)
            nn.init.zeros_(self.b.weight)

        def forward(self, x: Tensor) -> Tensor:
            return F.layer_norm(self.frozen(x) + self.b(self.a(x)), (WIDTH,))

    found = verdicts(param_groups(LoRA(), vectors()))
    assert found == dict.fromkeys(("frozen.weight", "a.weight", "b.weight"), SCALE_DEPENDENT)


def test_frozen_weights_are_grouped_and_examined() -> None:
    model = ResNet(nn.BatchNorm2d).requires_grad_(False)
    model.classifier.requires_grad_(True)
    assert with_rule(param_groups(model, images()), "scale_invariant") == CONVOLUTIONS


def test_hook_based_reparametrizations() -> None:
    with pytest.warns(FutureWarning, match="weight_norm"):
        first = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(first, nn.Tanh(), nn.utils.spectral_norm(nn.Linear(WIDTH, 3)))
    found = rules(param_groups(model, vectors()))
    assert found["0.weight_v"] == found["2.weight_orig"] == "scale_invariant"
    assert found["0.weight_g"] == "general"


def test_complex_weights_and_plain_tensor_attributes() -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64))
            self.table = torch.randn(WIDTH, WIDTH, dtype=torch.complex64)  # not a buffer
            self.head = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.normalize((x.to(torch.complex64) @ self.table @ self.weight).abs()))

    found = rules(param_groups(Complex(), vectors()))
    assert found == {"weight": "scale_invariant", "head.weight": "general", "head.bias": "low_dim"}


def test_sparse_embedding_gradients() -> None:
    model = nn.Sequential(nn.Embedding(11, WIDTH, sparse=True), nn.LayerNorm(WIDTH))
    assert rules(param_groups(model, tokens()))["0.weight"] == "scale_invariant"


def test_compiled_models_are_examined_without_compiling() -> None:
    def backend(*_: object) -> Callable[..., Any]:
        raise AssertionError("the twin was compiled")

    model = linear_chain(nn.LayerNorm(WIDTH), **NO_BIAS)
    compiled = cast(nn.Module, torch.compile(model, backend=backend))
    found = with_rule(param_groups(compiled, vectors()), "scale_invariant")
    assert found == {f"_orig_mod.{name}" for name in CHAIN}


# What no gradient reaches


class PartlyUsed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.cut = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.cut(x).detach()


def test_weights_without_gradient_are_unknown_and_general() -> None:
    groups = param_groups(PartlyUsed(), vectors())
    assert {name: rule for name, rule in verdicts(groups).items() if "bias" not in name} == {
        "used.weight": SCALE_DEPENDENT,
        "unused.weight": NO_GRADIENT,
        "cut.weight": NO_GRADIENT,
    }
    assert with_rule(groups, "general") == {"used.weight", "unused.weight", "cut.weight"}


def test_rounding_noise_is_not_a_gradient() -> None:
    # BatchNorm takes the shift out again: its true gradient is zero, the computed one is noise.
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(WIDTH, 8, bias=False), nn.Linear(8, 3)
            self.shift, self.norm = nn.Parameter(torch.randn(1, 8)), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.norm(self.first(x) + self.shift))

    found = verdicts(param_groups(Shifted(), vectors()))
    assert (found["shift"], found["first.weight"]) == (NO_GRADIENT, SCALE_INVARIANT)


def test_a_weight_missed_in_some_trials_is_judged_by_the_others() -> None:
    class EverySecondTime(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH, bias=False)
            self.second = nn.Linear(WIDTH, WIDTH, bias=False)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            y = self.second(x)
            return y + F.layer_norm(self.first(x), (WIDTH,)) if self.calls % 2 == 0 else y

    assert rules(param_groups(EverySecondTime(), vectors())) == {
        "first.weight": "scale_invariant",
        "second.weight": "general",
    }


def test_gradients_that_are_not_finite_are_reported_as_such() -> None:
    class Root(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).sqrt()  # of negative numbers

    assert verdicts(param_groups(Root(WIDTH, 8), vectors()))["weight"] == NOT_FINITE


# How the model is called


class TwoInputs(nn.Module):
    """Scale-invariant on its left, not on its right; its result is packed by ``pack``."""

    def __init__(self, pack: Callable[[Tensor, Tensor], Any] = lambda a, b: (a, b)) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(WIDTH, 8, bias=False), nn.Linear(WIDTH, 8, bias=False)
        self.pack = pack

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.pack(F.layer_norm(self.left(x), (8,)), self.right(y))


LEFT_ONLY = {"left.weight": "scale_invariant", "right.weight": "general"}
Pair = collections.namedtuple("Pair", ["x", "y"])


@dataclasses.dataclass(frozen=True)
class PairData:
    x: Any
    y: Any


PACKINGS: dict[str, Callable[[Any, Any], Any]] = {
    "tuple": lambda a, b: (a, b),
    "list": lambda a, b: [a, b],
    "dict": lambda a, b: {"x": a, "y": b},
    "mapping": lambda a, b: types.MappingProxyType({"x": a, "y": b}),
    "namedtuple": Pair,
    "dataclass": PairData,
    "nested": lambda a, b: {"x": [a], "y": (None, PairData("text", {"deep": b})), "z": a > 0},
}


@pytest.mark.parametrize("pack", PACKINGS.values(), ids=PACKINGS)
def test_every_tensor_of_a_nested_output_counts(pack: Callable[[Any, Any], Any]) -> None:
    assert rules(param_groups(TwoInputs(pack), (vectors(), vectors()))) == LEFT_ONLY


@pytest.mark.parametrize("kind", ["dict", "namedtuple"])
def test_batches_are_spread_over_the_arguments(kind: str) -> None:
    # y is half precision and x is a graph's result: both must come as float64 leaves of their own.
    x = vectors().requires_grad_() * 2
    batch = PACKINGS[kind](x, vectors().half())
    assert rules(param_groups(TwoInputs(), batch)) == LEFT_ONLY


@pytest.mark.parametrize("kind", ["namedtuple", "dataclass"])
def test_a_custom_forward_gets_the_batch_in_its_own_type(kind: str) -> None:
    seen: list[Any] = []

    def forward(model: nn.Module, batch: Any) -> Tensor:
        seen.append(batch)
        return model(batch.x, batch.y)[0]

    batch = PACKINGS[kind](vectors(), vectors())
    groups = param_groups(TwoInputs(), batch, forward=forward, trials=2)
    assert verdicts(groups)["right.weight"] == NO_GRADIENT
    assert {type(b) for b in seen} == {type(batch)}
    assert all(b.x.dtype == torch.float64 and torch.equal(b.x, batch.x.double()) for b in seen)


def test_the_model_sees_train_mode_and_float64_factories() -> None:
    class Recurrent(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert self.training
            state = torch.ones(len(x), WIDTH)  # in float32 it could not meet the weight
            return F.layer_norm(super().forward(state) + super().forward(x), (WIDTH,))

    model = Recurrent(WIDTH, WIDTH, bias=False).eval()
    assert rules(param_groups(model, vectors())) == {"weight": "scale_invariant"}


def test_models_may_differentiate_by_their_input() -> None:
    class Force(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            energy = F.normalize(super().forward(x)).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    model = Force(WIDTH, 4, bias=False)
    found = rules(param_groups(model, vectors().requires_grad_()))
    assert found == {"weight": "scale_invariant"}


def test_bytes_read_as_float32_stay_float32() -> None:
    class Packed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            ones = torch.full((WIDTH,), 0x3F800000, dtype=torch.int32).view(torch.float32)
            assert torch.equal(ones, torch.ones(WIDTH, dtype=torch.float32))
            return F.rms_norm(super().forward(x * ones), (WIDTH,))

    model = Packed(WIDTH, WIDTH, bias=False)
    assert rules(param_groups(model, vectors())) == {"weight": "scale_invariant"}


@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.device("meta"),
    ],
    ids=["no_grad", "inference_mode", "autocast", "default_device"],
)
def test_contexts_around_the_call_do_not_matter(context: Callable[[], Any]) -> None:
    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        assert not torch.is_autocast_enabled("cpu")
        return model(batch)

    model, batch = linear_chain(nn.LayerNorm(WIDTH), **NO_BIAS), vectors()
    with context():
        groups = param_groups(model, batch, forward=forward)
    assert with_rule(groups, "scale_invariant") == CHAIN


def test_devices_without_float64_are_examined_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[nn.Module] = []
    monkeypatch.setattr(scale_invariance, "_has_float64", lambda device: False)
    monkeypatch.setattr(nn.Module, "cpu", lambda self: moved.append(self))
    model = linear_chain(nn.LayerNorm(WIDTH), **NO_BIAS)
    assert with_rule(param_groups(model, vectors()), "scale_invariant") == CHAIN
    assert len(moved) == 1
    assert moved[0] is not model


# No side effects


class Stateful(nn.Module):
    """Everything that could leak: BatchNorm, dropout, random numbers, work in place on x."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.norm = nn.BatchNorm2d(4, eps=1e-3)
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(64, 5)
        self.scale = torch.ones(4, 1, 1)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        random.random()
        np.random.rand()
        x = x.relu_() * (1 + 0.1 * torch.rand(()))
        return self.head(self.dropout(self.norm(self.conv(x)) * self.scale).flatten(1))


def bits(tensors: Iterable[Tensor | None]) -> list[bytes | None]:
    return [None if t is None else t.detach().cpu().numpy().tobytes() for t in tensors]


def snapshot(model: Stateful, batch: Tensor) -> dict[str, Any]:
    return {
        "names": list(model.state_dict()),
        "state": bits(model.state_dict().values()),
        "dtypes": [t.dtype for t in model.state_dict().values()],
        "identity": [id(p) for p in model.parameters()],
        "grads": bits(p.grad for p in model.parameters()),
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "training": [m.training for m in model.modules()],
        "eps": model.norm.eps,
        "plain": (bits([model.scale]), model.scale.dtype),
        "batch": (bits([batch]), batch.dtype, batch.requires_grad),
        "torch_random": bits([torch.get_rng_state()]),
        "python_random": random.getstate(),
        "numpy_random": np.random.get_state()[2],
        "modes": (torch.get_default_dtype(), torch.is_grad_enabled()),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "raises"])
def test_nothing_is_touched(fails: bool, dtype: torch.dtype) -> None:
    model, batch = Stateful().to(dtype), images().to(dtype)
    model.scale = model.scale.to(dtype)
    model(batch.clone()).sum().backward()
    model.conv.weight.grad = None
    model.norm.requires_grad_(False)
    model.dropout.eval()
    before = snapshot(model, batch)
    if fails:
        with pytest.raises(RuntimeError):
            param_groups(model, batch, forward=lambda m, b: m(b) @ m(b))
    else:
        assert rules(param_groups(model, batch))["conv.weight"] == "scale_invariant"
    after = snapshot(model, batch)
    assert [key for key in before if before[key] != after[key]] == []


def test_threads_take_turns() -> None:
    inside: list[int] = []

    def forward(model: nn.Module, batch: Tensor) -> Tensor:
        inside.append(1)
        time.sleep(0.05)
        assert len(inside) == 1
        inside.clear()
        return model(batch)

    def found(trials: int) -> set[str]:
        model = linear_chain(nn.LayerNorm(WIDTH), **NO_BIAS)
        groups = param_groups(model, vectors(), forward=forward, trials=trials)
        return with_rule(groups, "scale_invariant")

    with ThreadPoolExecutor(2) as pool:  # the second begins later and ends later
        assert list(pool.map(found, (1, 3))) == [CHAIN, CHAIN]
    assert torch.get_default_dtype() == torch.float32


@functools.lru_cache(None)
def table(rows: int) -> Tensor:
    return torch.arange(rows, dtype=torch.float32)[:, None] * torch.ones(WIDTH)


@functools.cache
def not_called_meanwhile() -> Tensor:
    return torch.ones(())


@pytest.mark.parametrize("fails", [False, True], ids=["succeeds", "raises"])
def test_cached_functions_keep_nothing_of_the_copy(fails: bool) -> None:
    class Positions(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + table(len(x)))

    model, kept = Positions(WIDTH, 3), not_called_meanwhile()
    if fails:
        with pytest.raises(RuntimeError):
            param_groups(model, vectors(), forward=lambda m, b: m(b) @ m(b))
    else:
        param_groups(model, vectors())
    assert model(vectors()).dtype == torch.float32
    assert not_called_meanwhile() is kept


def test_a_batchnorm_frozen_in_a_model_in_train_mode_is_a_linear_map() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))
    assert rules(param_groups(model, vectors()))["0.weight"] == "scale_invariant"
    assert rules(param_groups(model.eval(), vectors()))["0.weight"] == "scale_invariant"
    model.train()[1].eval()
    assert rules(param_groups(model, vectors()))["0.weight"] == "general"
    assert [module.training for module in model] == [True, False, True]


def test_gradients_outside_the_model_are_not_touched() -> None:
    temperature = nn.Parameter(torch.ones(()))
    model = nn.Linear(WIDTH, 3)
    param_groups(model, vectors(), forward=lambda m, b: m(b) * temperature)
    assert temperature.grad is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning")  # the process's first
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda() -> None:
    model = linear_chain(nn.BatchNorm1d(WIDTH), **NO_BIAS).cuda()
    before = torch.cuda.get_rng_state()
    with torch.autocast("cuda", torch.bfloat16):
        groups = param_groups(model, vectors())  # the batch is moved to the model
    assert with_rule(groups, "scale_invariant") == CHAIN
    assert torch.equal(before, torch.cuda.get_rng_state())  # although dropout ran


# Batches that tell nothing


def hidden_layers() -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(WIDTH, WIDTH, **NO_BIAS), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        *(nn.Linear(WIDTH, WIDTH, **NO_BIAS), nn.BatchNorm1d(WIDTH), nn.ReLU()),
        nn.Linear(WIDTH, 3),
    )


def convolutions() -> nn.Module:
    def conv(inside: int) -> nn.Module:
        return nn.Conv2d(inside, 8, 3, padding=1, bias=False)

    first, second = (nn.Sequential(conv(i), nn.BatchNorm2d(8), nn.ReLU()) for i in (3, 8))
    return nn.Sequential(first, second, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


def test_a_later_norm_layer_hides_an_eps() -> None:
    groups = param_groups(convolutions(), 1e-3 * torch.randn(4, 3, 8, 8))
    assert with_rule(groups, "scale_invariant") == {"0.0.weight", "1.0.weight"}
    lone = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.Flatten(2))
    groups = param_groups(lone, 1e-3 * torch.randn(4, 3, 8, 8))
    assert verdicts(groups)["0.weight"] == EPS_MATTERS


DULL: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "zeros": (hidden_layers, torch.zeros(8, WIDTH)),
    "ones": (hidden_layers, torch.ones(8, WIDTH)),
    "one sample": (hidden_layers, torch.linspace(-1, 1, WIDTH).expand(8, WIDTH)),
    "a large mean": (hidden_layers, 1e5 + torch.linspace(-1, 1, 8 * WIDTH).sin().view(8, WIDTH)),
    "black images": (convolutions, torch.zeros(4, 3, 8, 8)),
}


@pytest.mark.parametrize("case", DULL)
def test_a_batch_that_does_not_vary_is_pointed_out(case: str) -> None:
    make, batch = DULL[case]
    with pytest.warns(UserWarning, match="example_batch") as caught:
        found = set(verdicts(param_groups(make(), batch)).values())
    assert caught[0].filename == __file__
    assert HARDLY_VARIES in found
    assert not found & {SCALE_DEPENDENT, EPS_MATTERS}


@pytest.mark.parametrize("offset", [0.0, 1.0, 300.0])
def test_no_warning_about_a_batch_that_varies(offset: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        groups = param_groups(hidden_layers(), vectors() + offset)
        param_groups(convolutions(), torch.randn(4, 3, 8, 8) + offset)
        param_groups(hidden_layers().eval(), vectors())
        param_groups(nn.Sequential(nn.Linear(WIDTH, 4), nn.LayerNorm(4)), torch.ones(3, WIDTH))
    assert with_rule(groups, "scale_invariant") == {"0.weight", "3.weight"}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.matrices, self.last = [torch.randn(WIDTH, WIDTH)], nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x @ self.matrices[0])


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, self.first(x), use_reentrant=True))


@pytest.mark.parametrize(
    ("model", "hint"), [(Holder, "register_buffer"), (Reentrant, "use_reentrant=False")]
)
def test_errors_name_the_likely_cause(model: Callable[[], nn.Module], hint: str) -> None:
    with pytest.raises(RuntimeError, match=hint):
        param_groups(model(), vectors())


class Checkpointed(nn.Module):
    """Casts inside, as transformers' RMSNorm does; in float64 neither pass may."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, 2)

    def layer(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x).to(torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.layer, x, use_reentrant=False))


def test_a_checkpointed_layer_that_casts() -> None:
    groups = param_groups(Checkpointed(), vectors())
    assert with_rule(groups, "scale_invariant") == {"first.weight"}


class Renamed(nn.Linear):
    """Keras: a copied layer gets a number of its own, and its weights have names by it."""

    def __deepcopy__(self, memo: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(self.in_features, self.out_features))


def test_a_copy_with_other_names_is_refused() -> None:
    with pytest.raises(RuntimeError, match="the copy gives its parameters other names"):
        param_groups(Renamed(WIDTH, 2), vectors())


def test_a_scripted_model_is_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        model = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
    with pytest.raises(ValueError, match="script"):
        param_groups(model, torch.randn(3, 4))
    assert rules(param_groups(model)).keys() == {"0.weight", "0.bias", "1.weight", "1.bias"}


# Errors


class NoTensor(nn.Linear):
    def forward(self, x: Tensor) -> Any:
        return {"detached": super().forward(x).detach(), "text": "loss"}


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4))


OTHER = nn.Embedding(11, 4)  # neither the model nor its copy

ERRORS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "model": (lambda: param_groups(cast(Any, [])), ValueError, "list"),
    "trials": (lambda: param_groups(small(), trials=0), ValueError, "trials .*0"),
    "tolerance": (
        lambda: param_groups(small(), tolerance=0.0),
        ValueError,
        "tolerance .*0.0",
    ),
    "forward-without-batch": (
        lambda: param_groups(small(), forward=lambda m, b: m(b)),
        ValueError,
        "example_batch",
    ),
    "lazy": (
        lambda: param_groups(nn.LazyLinear(3), vectors()),
        ValueError,
        "'weight' is lazy",
    ),
    "meta": (
        lambda: param_groups(nn.Linear(WIDTH, 3, device="meta"), vectors()),
        ValueError,
        "'weight' .*meta",
    ),
    "no-output": (
        lambda: param_groups(NoTensor(WIDTH, 3), vectors()),
        ValueError,
        "dict.*forward=",
    ),
    "other-model": (
        lambda: param_groups(nn.Embedding(11, 4), tokens(), forward=lambda _, b: OTHER(b)),
        ValueError,
        "does forward call the model that it is given",
    ),
    "wrong-shape": (
        lambda: param_groups(small(), torch.randn(4, 3)),
        RuntimeError,
        "(?s)mat1 and mat2.*forward=.*examines nothing",
    ),
    "one-sample": (
        lambda: param_groups(small(), vectors()[:1]),
        RuntimeError,
        "(?s)more than 1 value per channel.*several samples",
    ),
}


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
@pytest.mark.parametrize(("call", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors_say_what_to_do(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    if error is RuntimeError:
        assert caught.value.__cause__ is not None


def test_a_model_that_cannot_be_copied_is_explained() -> None:
    model = small()
    vars(model)["lock"] = (i for i in range(3))  # generators cannot be copied
    with pytest.raises(RuntimeError, match=r"TypeError.*example_batch=None"):
        param_groups(model, vectors())
    assert param_groups(model)[0]["rule"] == "auto"
