"""docs/troubleshooting.md has a heading for what users meet when they wrap, shard or load."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from adamo_optim import AdamO, param_groups, rebind
from adamo_optim.callbacks import log_diagnostics
from adamo_optim.integrations import with_rules

PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text()
HEADINGS = [h.strip("` ") for h in re.findall(r"^### (.*)$", PAGE, flags=re.MULTILINE)]


def parameter(**attributes: Any) -> nn.Parameter:
    p = nn.Parameter(torch.ones(4, 2))
    for name, value in attributes.items():
        setattr(p, name, value)
    return p


def swapped() -> None:
    optimizer = AdamO([parameter()])
    flat = torch.ones(8, requires_grad=True)
    optimizer.param_groups[0]["params"] = [flat]
    flat.grad = torch.ones(8)
    optimizer.step()


def sparse() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = AdamO(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()


def became_strided() -> None:
    p = parameter()
    optimizer = AdamO([p], fused=True)
    p.grad = torch.ones(4, 2)
    optimizer.step()
    p.data = torch.ones(4, 4)[:, ::2]
    p.grad = torch.ones(4, 2)
    optimizer.step()


def reshaped() -> None:
    p = parameter()
    optimizer = AdamO([p])
    p.data = torch.ones(6, 2)
    optimizer.step()


def uncopyable() -> list[dict[str, Any]]:
    model = nn.Linear(4, 2)
    model.lock = (item for item in ())  # generators cannot be copied
    return param_groups(model, torch.ones(3, 4))


def newer_schema() -> None:
    optimizer = AdamO([parameter()])
    state = optimizer.state_dict()
    state["param_groups"][0]["schema"] = 99
    optimizer.load_state_dict(state)


def foreign_state() -> None:
    AdamO([parameter()]).load_state_dict(torch.optim.AdamW([parameter()]).state_dict())


def rounding() -> AdamO:
    return AdamO([nn.Parameter(torch.ones(2, 2).half())], rounding="stochastic")


def two_kinds() -> None:
    groups = [{"params": [parameter()]}, {"params": [parameter()], "differentiable": True}]
    AdamO(groups)


def scaled_by_hand() -> None:
    p = parameter()
    optimizer: Any = AdamO([p], foreach=False, fused=False)
    p.grad = torch.ones_like(p)
    optimizer.grad_scale = torch.tensor(2.0)
    optimizer.step()


def scripted() -> list[dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return param_groups(torch.jit.script(nn.Linear(4, 2)), torch.ones(3, 4))


def scheduled() -> AdamO:
    adamw = torch.optim.AdamW([parameter()])
    scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, lambda step: 1.0)
    return AdamO.from_adamw(adamw, scheduler=scheduler, lr=1e-4)


STRANGER = [{"params": [parameter()]}]
SGD = torch.optim.SGD([torch.ones(1)])
LINEAR = nn.Linear(4, 2)
BATCH = torch.ones(3, 4)

# what triggers it; the heading
CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: AdamO([parameter(_is_flat_param=True)]), "… is an FSDP1 flat parameter."),
    (lambda: AdamO([parameter(ds_id=0)]), "… is managed by DeepSpeed ZeRO."),
    (swapped, "… was put in the place of the parameter AdamO was built with, and it is flat."),
    (sparse, "AdamO does not support sparse gradients, and the gradient of … is one."),
    (lambda: AdamO([torch.ones(2).int()]), "… must be a floating or complex tensor, got …"),
    (uncopyable, "The model cannot be copied (…)."),
    (lambda: param_groups(LINEAR, torch.ones(3, 5)), "The model could not be examined: …"),
    (
        lambda: param_groups(nn.Sequential(LINEAR, nn.BatchNorm1d(2)), BATCH),
        "Features before a BatchNorm hardly vary in this example_batch",
    ),
    (scripted, "A scripted model cannot be examined: call param_groups before scripting."),
    (scheduled, "lr=… and a scheduler: some schedulers go on from it, others from the rate they"),
    (
        lambda: rebind([], LINEAR),
        "no group has the parameters … of this model.",
    ),
    (lambda: param_groups(LINEAR.__class__(2, 2, device="meta")), "is on the meta device"),
    (lambda: param_groups(nn.LazyLinear(2)), "is lazy and has no shape yet"),
    (lambda: with_rules(STRANGER, LINEAR, BATCH), "a parameter of shape … in group …"),
    (
        lambda: with_rules(LINEAR.parameters(), LINEAR, BATCH),  # type: ignore[arg-type]
        'groups must be dictionaries with "params"',
    ),
    (
        lambda: AdamO([*param_groups(LINEAR, BATCH), {"params": [parameter()]}]),
        "all optimizer param groups should be with/without names.",
    ),
    (lambda: param_groups(LINEAR, BATCH, overrides={"x": "low_dim"}), "The override … matches no"),
    (
        lambda: param_groups(LINEAR, BATCH, forward=lambda *_: "text"),
        "The model's output, of type …, contains no tensor that requires grad",
    ),
    (
        lambda: AdamO([nn.Parameter(torch.ones(4, 4)[:, ::2])], fused=True),
        "fused=True cannot be honoured for …",
    ),
    (
        lambda: AdamO([parameter()], fused=True, foreach=True),
        "`fused` and `foreach` cannot be `True` together.",
    ),
    (became_strided, "fused=True cannot be honoured for …"),
    (reshaped, "… had the shape … and now has …, which its state does not fit."),
    (rounding, "rounding='stochastic' is for bfloat16 parameters, … is float16"),
    (scaled_by_hand, "grad_scale and found_inf are for fused=True"),
    (two_kinds, "differentiable must be the same for all groups"),
    (foreign_state, "this state_dict was not written by AdamO."),
    (newer_schema, "this state_dict has schema …; this version of adamo-optim reads up to …"),
    (lambda: AdamO.from_adamw(SGD), "from_adamw needs a torch.optim.AdamW or torch.optim.Adam"),
    (
        lambda: AdamO.radial_sgd([parameter()], weight_decay=0.1),
        "weight_decay=… takes … of every weight away per step",
    ),
    (lambda: AdamO([parameter()], weight_decay=-0.1), "… must be >= …, got …"),
    (lambda: log_diagnostics(SGD, print, 0), "there is no AdamO in this …"),
]


@pytest.mark.parametrize(
    ("trigger", "heading"), CASES, ids=[heading[:40].strip("… ") for _, heading in CASES]
)
def test_the_page_has_a_heading_for(trigger: Callable[[], Any], heading: str) -> None:
    if trigger is became_strided and AdamO([parameter()]).explain()[0].backend != "fused":
        pytest.skip("the native kernel was not built")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, RuntimeError, TypeError, UserWarning)) as caught:
            trigger()
    pattern = ".*".join(map(re.escape, heading.split("…")))
    assert re.search(pattern, str(caught.value), flags=re.DOTALL)
    assert any(heading.strip("`") in h for h in HEADINGS), (
        "docs/troubleshooting.md lacks this heading"
    )
