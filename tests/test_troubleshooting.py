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

from adamo_optim import AdamO, AngularAdamW, param_groups, rebind
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


def reloaded(change: Callable[[dict[str, Any]], Any], optimizer: Any = None) -> Any:
    """Load a state_dict after a change to it."""

    def load() -> None:
        found = optimizer() if optimizer else AdamO([parameter()])
        state = found.state_dict()
        change(state)
        found.load_state_dict(state)

    return load


def switched(adam: Any = torch.optim.AdamW, **options: Any) -> Callable[[], None]:
    """Load the state of torch's AdamW or Adam into AngularAdamW."""

    def load() -> None:
        turning = {"params": [parameter()], "rule": "scale_invariant"}
        AngularAdamW([turning]).load_state_dict(adam([parameter()], **options).state_dict())

    return load


def foreign_state() -> None:
    AdamO([parameter()]).load_state_dict(torch.optim.AdamW([parameter()]).state_dict())


def groups_merged() -> None:
    twins = nn.ParameterDict({"a": parameter(), "b": parameter()})
    parts = [{"params": [p], "lr": lr} for p, lr in zip(twins.values(), (1e-3, 1e-2), strict=True)]
    old = torch.optim.AdamW(parts)
    groups = [{"params": [*twins.values()], "rule": "general", "order": [0, 1]}]
    AngularAdamW(groups).load_state_dict(old.state_dict())


def counted() -> None:
    old = torch.optim.AdamW([parameter()])
    groups = [{"params": [parameter(), parameter()], "rule": "general", "order": [0, 1]}]
    AngularAdamW(groups).load_state_dict(old.state_dict())


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
        warnings.simplefilter("ignore")  # TorchScript is deprecated
        return param_groups(torch.jit.script(nn.Linear(4, 2)), torch.ones(3, 4))


STRANGER = [{"params": [parameter()]}]
SGD = torch.optim.SGD([torch.ones(1)])
ADAM = torch.optim.Adam([torch.ones(1)]).param_groups[0]
LINEAR = nn.Linear(4, 2)
BATCH = torch.ones(3, 4)

# what triggers it; the heading
CASES: list[tuple[Callable[[], Any], str]] = [
    (lambda: AdamO([parameter(_is_flat_param=True)]), "… is an FSDP1 flat parameter."),
    (lambda: AdamO([parameter(ds_id=0)]), "… is managed by DeepSpeed ZeRO."),
    (
        swapped,
        "… was put in the place of the parameter that the optimizer was built with, and it is",
    ),
    (sparse, "sparse gradients are not supported, and the gradient of … is one."),
    (lambda: AdamO([torch.ones(2).int()]), "… must be a floating or complex tensor, got …"),
    (lambda: param_groups(LINEAR, torch.ones(3, 5)), "The model could not be examined: …"),
    (
        lambda: param_groups(nn.Sequential(LINEAR, nn.BatchNorm1d(2)), BATCH),
        "Features before a BatchNorm hardly vary in this example_batch",
    ),
    (
        lambda: AdamO([*param_groups(LINEAR, BATCH), {"params": [parameter()]}]),
        "all optimizer param groups should be with/without names.",
    ),
    (
        lambda: AdamO([nn.Parameter(torch.ones(4, 4)[:, ::2])], fused=True),
        "fused=True cannot be honoured for …",
    ),
    (became_strided, "fused=True cannot be honoured for …"),
    (rounding, "rounding='stochastic' is for bfloat16 parameters, … is float16"),
    (scaled_by_hand, "grad_scale and found_inf are for fused=True"),
]

CLEAR: list[tuple[Callable[[], Any], str]] = [  # no heading: the message says what to do
    (uncopyable, "The model cannot be copied (…)."),
    (
        lambda: param_groups(LINEAR, torch.full((3, 4), torch.nan)),
        "example_batch has NaN or infinity in a tensor of shape …",
    ),
    (
        lambda: rebind([], LINEAR),
        "no group has the parameters … of this model.",
    ),
    (lambda: param_groups(LINEAR.__class__(2, 2, device="meta")), "is on the meta device"),
    (lambda: param_groups(nn.LazyLinear(2)), "is lazy and has no shape yet"),
    (lambda: param_groups(LINEAR, BATCH, overrides={"x": "low_dim"}), "The override … matches no"),
    (
        lambda: param_groups(LINEAR, BATCH, forward=lambda *_: "text"),
        "The model's output, of type …, contains no tensor that requires grad",
    ),
    (reshaped, "… had the shape … and now has …, which its state does not fit."),
    (foreign_state, "this state_dict was not written by AdamO"),
    (
        reloaded(lambda state: state["param_groups"][0].update(schema="1")),
        "this state_dict has schema …, and this version of adamo-optim reads …",
    ),
    (
        reloaded(lambda state: state["param_groups"][0].update(lr=-1)),
        "this state_dict has an illegal option: …",
    ),
    (
        reloaded(lambda state: state["state"][0].update(exp_avg=torch.ones(3))),
        "… of shape … needs a dense … of that shape, and this state_dict has …",
    ),
    (
        reloaded(lambda state: state["state"][0].update(tau=torch.tensor(torch.nan))),
        "… of … must be finite, got …",
    ),
    (switched(amsgrad=True), "this state_dict has amsgrad=True"),
    (
        switched(torch.optim.Adam, weight_decay=0.1),
        "this state_dict is torch.optim.Adam's with weight_decay=…",
    ),
    (groups_merged, "… and others share a group here and were in different ones"),
    (counted, "this state_dict has … parameters, and the optimizer has …"),
    (
        lambda: AdamO([parameter()], weight_decay=0.1),
        "weight_decay=… takes … of every weight away per step",
    ),
    (
        lambda: AngularAdamW([parameter()]),
        "no group says which weights are scale-invariant, so nothing turns and this is AdamW.",
    ),
    (lambda: AdamO([parameter()], weight_decay=-0.1), "… must be >= …, got …"),
    (lambda: log_diagnostics(SGD, print, 0), "there is no AdamO and no AngularAdamW in this …"),
    (lambda: AdamO([parameter()], learning_rate=1e-3), "… has no option …"),
    (scripted, "A scripted model cannot be examined: call param_groups before scripting."),
    (
        lambda: param_groups(LINEAR, torch.utils.data.DataLoader([1])),  # type: ignore[arg-type]
        "example_batch is a DataLoader",
    ),
    (lambda: with_rules(STRANGER, LINEAR, BATCH), "a parameter of shape … in group …"),
    (
        lambda: with_rules(LINEAR.parameters(), LINEAR, BATCH),  # type: ignore[arg-type]
        'groups must be dictionaries with "params"',
    ),
    (
        lambda: AdamO([parameter()], fused=True, foreach=True),
        "`fused` and `foreach` cannot be `True` together.",
    ),
    (two_kinds, "differentiable must be the same for all groups"),
    (lambda: AdamO(LINEAR), "… takes parameters, not a model"),
]


def ids(cases: list[tuple[Callable[[], Any], str]]) -> list[str]:
    return [text[:40].strip("… ") for _, text in cases]


def message_of(trigger: Callable[[], Any]) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises((ValueError, RuntimeError, TypeError, UserWarning)) as caught:
            trigger()
    return str(caught.value)


def matches(message: str, text: str) -> bool:
    return bool(re.search(".*".join(map(re.escape, text.split("…"))), message, flags=re.DOTALL))


@pytest.mark.parametrize(("trigger", "heading"), CASES, ids=ids(CASES))
def test_the_page_has_a_heading_for(trigger: Callable[[], Any], heading: str) -> None:
    if trigger is became_strided and AdamO([parameter()]).explain()[0].backend != "fused":
        pytest.skip("the native kernel was not built")
    assert matches(message_of(trigger), heading)
    assert any(heading.strip("`") in h for h in HEADINGS), (
        "docs/troubleshooting.md lacks this heading"
    )


@pytest.mark.parametrize(("trigger", "text"), CLEAR, ids=ids(CLEAR))
def test_the_message_says_what_to_do(trigger: Callable[[], Any], text: str) -> None:
    if "torch.optim.Adam's" in text and "decoupled_weight_decay" not in ADAM:
        pytest.skip("torch 2.6 does not write what tells Adam's L2 term from AdamW's decay")
    assert matches(message_of(trigger), text)
