"""What both optimizers share: parameters in buckets, their layout, checkpoints, explanations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer, StateDict, _use_grad_for_differentiable

from . import checkpoint, diagnostics, sharding
from .buckets import Bucket, Member, same
from .dtensor import holds_whole_rows, is_sharded, local, mesh_of, placements_of
from .explain import Explanation, Parameter
from .options import as_pair, check_options, refuse_foreign, refuse_misspelt
from .ranges import OPTIONAL
from .rules import rule_of

FLAT_PARAMETER_HELP = (
    "The norm of every weight tensor is needed, and a flattened parameter has lost it. "
    "Use FSDP2 (torch.distributed.fsdp.fully_shard) or DistributedDataParallel instead; "
    "see docs/troubleshooting.md."
)

# torch's check that a step may be captured in a graph; torch 2.6 has it under its first name.
CHECK_CAPTURE: Callable[[Optimizer], None] = getattr(
    Optimizer, "_accelerator_graph_capture_health_check", None
) or getattr(Optimizer, "_cuda_graph_capture_health_check")  # noqa: B009 - unknown to newer torch


class Layout:
    """The blocks in buckets by device, backend and mesh, with what they were made from."""

    def __init__(self, optimizer: Blockwise) -> None:
        self.groups = list(optimizer.param_groups)
        self.structure = optimizer._structure()
        self.resting: list[Tensor] = []  # frozen or lazy so far: no place in a bucket
        self.on_mesh: Counter[Any] = Counter()  # how many blocks, resting ones too
        buckets: dict[Any, Bucket] = {}
        for p, name, group, number in optimizer._parameters():
            if is_lazy(p):
                self.resting.append(p)
            if is_lazy(p) or not optimizer._owns(p, group):
                continue
            rule = rule_of(p, group).name
            rows = optimizer._rows(p, group, rule)
            mesh = mesh_of(p)
            if rows is not None and optimizer.ROWS_ALONE and holds_whole_rows(p):
                mesh, rows = None, local(p).shape[0]
            mesh_row = self.on_mesh[mesh]
            self.on_mesh[mesh] += 1 if rows is None else rows
            if not optimizer._trains(p):
                if p.is_meta and p.grad is not None and group["fused"]:
                    raise RuntimeError(
                        f"fused=True cannot be honoured for {name}: it is on the meta device"
                    )
                self.resting.append(p)
                continue
            key = (p.device, optimizer._backend(p, group, name)[0], mesh)
            apart = rows is not None and not optimizer.ROWS_ALONE  # its law looks at all rows
            bucket = buckets.setdefault((*key, apart), optimizer._bucket(*key))
            state = optimizer.state[p]
            bucket.members.append(Member(p, name, rule, number, state, group, rows, mesh_row))
        self.buckets = list(buckets.values())
        for bucket in self.buckets:
            bucket.finish()
        self.states = list(optimizer.state.values())
        self.own = states_of_tensors(optimizer)

    def is_current(self, optimizer: Blockwise) -> bool:
        """False when groups, options, parameters or state are not what they were; in every step."""
        return (
            same(optimizer.param_groups, self.groups)
            and optimizer._structure() == self.structure
            and not any(map(optimizer._trains, self.resting))
            and self.has_states(optimizer)
            and all(bucket.is_current() for bucket in self.buckets)
        )

    def has_states(self, optimizer: Blockwise) -> bool:
        """Whether every parameter's dictionary is the one it was; others may come and go."""
        states = list(optimizer.state.values())
        if not same(states, self.states):
            if not same(states_of_tensors(optimizer), self.own):
                return False
            self.states = states
        return True


def states_of_tensors(optimizer: Optimizer) -> list[Any]:
    return [state for p, state in optimizer.state.items() if isinstance(p, Tensor)]


class Blockwise(Optimizer, ABC):
    """An optimizer that updates blocks, which have a norm; the base of both."""

    STRUCTURE: tuple[str, ...]  # options that decide how state is laid out
    NUMBERS: tuple[str, ...]  # state that must keep its own precision when it is loaded
    ROWS_ALONE = False  # what a rank has of whole rows concerns no other rank
    _layout: Layout | None = None  # the first step makes it
    _seen: Sequence[dict[int, bool]] = ()  # of every group: its parameters, and which are matrices
    _loading: StateDict | None = None  # what is being loaded, as the user's hooks left it

    # ---- what subclasses say --------------------------------------------------------------

    @abstractmethod
    def _bucket(self, device: torch.device, backend: str, mesh: Any) -> Bucket: ...

    @abstractmethod
    def _owns(self, p: Tensor, group: dict[str, Any]) -> bool:
        """Whether a parameter is a block, or somebody else updates it."""

    def _needs_norms(self, group: dict[str, Any]) -> bool:
        """Whether a group asks for what a flattened parameter cannot give."""
        return True

    def _rows(self, p: Tensor, group: dict[str, Any], rule: str) -> int | None:
        return None

    @abstractmethod
    def _backend(self, p: Tensor, group: dict[str, Any], name: str) -> tuple[str, str]:
        """The name of the backend of a block, and why it is not a faster one."""

    @abstractmethod
    def _populate(self) -> None:
        """Create the state that a step needs."""

    @abstractmethod
    def _adapted(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """A state_dict that may be another optimizer's, in our groups; or ``ValueError``."""

    @abstractmethod
    def _check_state(self, state: Mapping[str, Any], p: Tensor, name: str) -> None:
        """Raise ``ValueError`` if one parameter's state in a state_dict is damaged."""

    @abstractmethod
    def _describe(self, p: Tensor, name: str, group: dict[str, Any]) -> tuple[str, str, str, str]:
        """Rule, reason, backend and note of a parameter, for :meth:`explain`."""

    @abstractmethod
    def _update(self) -> None:
        """One step of all parameters that have a gradient."""

    # ---- a step ---------------------------------------------------------------------------

    @_use_grad_for_differentiable
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update all parameters that have a gradient; ``closure`` reevaluates the loss."""
        CHECK_CAPTURE(self)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._update()
        return loss

    @torch._disable_dynamo
    def _prepare(self) -> list[Any]:
        """What the host does in a step; the rest is tensor code that torch.compile can trace."""
        # a GradScaler sets these before a step that is to unscale and skip by itself
        amp = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
        works = (bucket.work(amp) for bucket in self._buckets())
        return [work for work in works if work is not None]

    def _run(self, works: list[Any]) -> None:
        """The device's part of a step."""
        sharded: dict[Any, list[Any]] = {}
        for work in works:
            if work.bucket.mesh is None:
                work.run()
            else:
                sharded.setdefault(work.bucket.mesh, []).append(work)
        for mesh, those in sharded.items():
            assert self._layout is not None
            sharding.step(those, self._layout.on_mesh[mesh])

    # ---- what users ask -------------------------------------------------------------------

    def explain(self) -> Explanation:
        """Which rule and backend each parameter got, and why."""
        rows = Explanation()
        for p, name, group, _ in self._parameters():
            if is_lazy(p):
                lazy = ("auto", "lazy: it has no shape yet", "not chosen yet")
                rows.append(Parameter(name, (), *lazy))
            else:
                rows.append(Parameter(name, tuple(p.shape), *self._describe(p, name, group)))
        return rows

    def diagnostics(self, synchronize: bool = False) -> dict[str, dict[str, Any]]:
        """What the last step did to each block: ``{parameter: {quantity: value}}``.

        The values are 0-D tensors on the parameters' device, or, with ``synchronize``, Python
        numbers fetched in one transfer per device. docs/diagnostics.md lists the quantities;
        :func:`adamo_optim.flatten_diagnostics` gives a logger's flat dictionary.
        """
        return diagnostics.collect(self._layout.buckets if self._layout else [], synchronize)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its options are checked."""
        if isinstance(param_group, dict):
            param_group = dict(param_group)  # so that the same groups can serve several optimizers
            refuse_misspelt(param_group, "a parameter group")
            refuse_foreign(param_group, type(self).__name__)
            check_options({**self.defaults, **param_group})
            if "betas" in param_group:
                param_group["betas"] = as_pair(param_group["betas"])
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_differentiable(group)
            for p, name in named(len(self.param_groups) - 1, group):
                if is_lazy(p) or not self._needs_norms(group):
                    continue
                check_parameter(p, name)
                if not p.is_meta and self._owns(p, group):
                    self._backend(p, group, name)
        except Exception:
            self.param_groups.pop()
            raise
        self._remember_parameters()

    def _check_differentiable(self, group: dict[str, Any]) -> None:
        if group["differentiable"] != self.defaults["differentiable"]:
            raise ValueError(
                "differentiable must be the same for all groups, and stay what it was when the "
                "optimizer was built"
            )

    # ---- checkpoints ----------------------------------------------------------------------

    @torch._disable_dynamo
    def state_dict(self) -> StateDict:
        """The state as in any torch optimizer; buffers of DTensors are DTensors themselves.

        Take it when you save it: its moments go on with the training, as in any torch optimizer,
        and the numbers of blocks are copies of what they were.
        """
        self._drop_unused()
        # the first hook after torch's own part: the user's see, and may replace, what is written
        handle = self.register_state_dict_post_hook(lambda _, x: self._written(x), prepend=True)
        try:
            return super().state_dict()
        finally:
            handle.remove()

    def _written(self, result: StateDict) -> None:
        """Put into a state_dict what stays as it is when the training goes on."""
        copies, states = self._copies(), result["state"]
        states.update({key: copies.get(id(state), state) for key, state in states.items()})

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: StateDict) -> None:
        """Load a state: all of it or, with a sentence on what is wrong, nothing."""
        # This hook is the last one, so it sees the dictionary as the user's hooks left it.
        # The base class casts state to the parameters' dtype; __setstate__ takes it back.
        source: StateDict = {}

        def look(_: Optimizer, final: StateDict) -> StateDict:
            source.update(checkpoint.checked(final, self))
            return source

        handle = self.register_load_state_dict_pre_hook(look)
        self._loading = source
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
            self._loading = None

    def __getstate__(self) -> dict[str, Any]:
        """What pickle writes."""
        result, copies = super().__getstate__(), self._copies()
        states: defaultdict[Any, Any] = defaultdict(dict)
        for p, state in result["state"].items():
            states[p] = copies.get(id(state), state)
        return {**result, "state": states}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._layout = None
        self._remember_parameters()
        if self._loading is not None:
            saved = chain.from_iterable(g["params"] for g in self._loading["param_groups"])
            params = chain.from_iterable(group["params"] for group in self.param_groups)
            for key, p in zip(saved, params, strict=True):
                for name, value in self._loading["state"].get(key, {}).items():
                    if isinstance(value, Tensor) and name in self.NUMBERS:
                        self.state[p][name] = value.to(p.device)

    def _copies(self) -> dict[int, dict[str, Any]]:
        """The states, by id, with numbers of their own: the next step changes the others.

        Those of one parameter share no memory with those of another: ``pickle`` writes all that is
        behind a tensor, and every number would bring the whole matrix.
        """
        copies: dict[int, dict[str, Any]] = {}
        for bucket in self._layout.buckets if self._layout else ():
            if bucket.differentiable:
                continue
            keys, matrix = bucket.Memory._fields, bucket.memory.detach().T.contiguous()
            parts = torch._foreach_mul(list(bucket.numbers_by_member(matrix)), 1.0)  # copies
            for member, part in zip(bucket.members, parts, strict=True):
                # rows one after the other: torch.distributed broadcasts what lies in memory
                vectors = part.unbind() if part.dim() == 1 else part.T.contiguous().unbind()
                pairs = zip(keys, vectors, strict=True)
                numbers = {key: bucket.as_state(key, vector, member) for key, vector in pairs}
                for key in bucket.SHARED if member.rows is not None else ():
                    numbers[key] = numbers[key].clone()  # not a place in a matrix
                copies[id(member.state)] = {**member.state, **numbers}
        return copies

    # ---- layout ---------------------------------------------------------------------------

    def _parameters(self) -> Iterator[tuple[Tensor, str, dict[str, Any], int]]:
        """Every parameter once, with a name of its own, its group and its running number."""
        seen: set[int] = set()
        times: Counter[str] = Counter()
        number = 0
        groups = [list(named(g, group)) for g, group in enumerate(self.param_groups)]
        uses = Counter(name for pairs in groups for name in {name for _, name in pairs})
        for g, pairs in enumerate(groups):
            for p, name in pairs:
                if id(p) not in seen:
                    seen.add(id(p))
                    unique = name if uses[name] == 1 else f"group{g}.{name}"
                    times[unique] += 1
                    unique += f"#{times[unique]}" if times[unique] > 1 else ""
                    yield p, unique, self.param_groups[g], number
                number += 1

    def _structure(self) -> list[Any]:
        """What of the groups decides a layout; also what None switches off, as no number can."""
        return [
            (
                list(map(id, group["params"])),
                [group.get(name) for name in self.STRUCTURE],
                [group.get(name) is None for name in OPTIONAL],
            )
            for group in self.param_groups
        ]

    def _trains(self, p: Tensor) -> bool:
        wanted = p.requires_grad or p.grad is not None or bool(self.state.get(p))
        return wanted and not p.is_meta and not is_lazy(p)

    def _buckets(self) -> list[Any]:
        """The blocks by device and backend, laid out anew when anything about them changed."""
        if self._layout is None or not self._layout.is_current(self):
            for group in self.param_groups:
                check_options(group)
                self._check_differentiable(group)
            for bucket in self._layout.buckets if self._layout else ():
                bucket.hand_back()
            self._check_swapped()
            self._remember_parameters()
            self._drop_unused()
            self._populate()
            self._layout = self._lay_out()
        return self._layout.buckets

    def _lay_out(self) -> Layout:
        return Layout(self)

    def _drop_unused(self) -> None:
        """Forget the untouched state of parameters that others have taken the place of.

        Trainers shard a model after its optimizer was built. State that a step has written stays,
        as in torch: its parameter may come back.
        """
        here = {id(p) for group in self.param_groups for p in group["params"]}
        for p in [p for p in self.state if isinstance(p, Tensor) and id(p) not in here]:
            step = self.state[p].get("step")
            if isinstance(step, Tensor) and not step.is_meta and not bool(local(step).any()):
                del self.state[p]

    def _remember_parameters(self) -> None:
        self._seen = [
            {id(p): not is_lazy(p) and p.dim() > 1 for p in group["params"]}
            for group in self.param_groups
        ]

    def _check_swapped(self) -> None:
        """ZeRO-style wrappers put flat partitions in the place of the parameters we were given."""
        known = {key for seen in self._seen for key in seen}
        for p, name, group, _ in self._parameters():
            if id(p) not in known and not is_lazy(p) and self._needs_norms(group):
                check_parameter(p, name)
        for g, (group, seen) in enumerate(zip(self.param_groups, self._seen, strict=False)):
            pairs = list(named(g, group))
            flat = [id(p) not in known and not is_lazy(p) and p.dim() == 1 for p, _ in pairs]
            if any(seen.values()) and flat and all(flat) and self._needs_norms(group):
                raise RuntimeError(
                    f"{pairs[0][1]} was put in the place of the parameter that the optimizer was "
                    f"built with, and it is flat. {FLAT_PARAMETER_HELP}"
                )


def named(index: int, group: dict[str, Any]) -> Iterator[tuple[Tensor, str]]:
    params, names = group["params"], group.get("param_names") or []
    if len(names) != len(params):  # none given, or a wrapper has put in other parameters
        names = [f"group{index}.param{i}" for i in range(len(params))]
    return zip(params, names, strict=True)


def check_parameter(p: Tensor, name: str) -> None:
    """Refuse what cannot keep a norm of its own, with the reason and the alternative."""
    if getattr(p, "_is_flat_param", False) or getattr(p, "_fsdp_flattened", False):
        raise RuntimeError(f"{name} is an FSDP1 flat parameter. {FLAT_PARAMETER_HELP}")
    if hasattr(p, "ds_id"):
        raise RuntimeError(f"{name} is managed by DeepSpeed ZeRO. {FLAT_PARAMETER_HELP}")
    if not (p.is_floating_point() or p.is_complex()):
        raise TypeError(
            f"{name} must be a floating or complex tensor, got {p.dtype}; "
            "see docs/troubleshooting.md."
        )
    if is_sharded(p) and any(placement.is_partial() for placement in placements_of(p)):
        raise RuntimeError(
            f"{name} is a DTensor with placements {placements_of(p)}: a rank that holds one term "
            "of a sum knows nothing about the norm. Redistribute it to Shard or Replicate; "
            "see docs/troubleshooting.md."
        )
