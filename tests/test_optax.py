"""adamo_optim.optax: the reference's numbers, and what optax's own transformations can do."""

from __future__ import annotations

import importlib.util
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("optax", reason="needs the extra [jax]")

import jax
import jax.numpy as jnp
import optax

from adamo_optim.optax import adamo, angular_adamw, find_rules
from adamo_optim.optax.scale_invariance import enable_x64
from adamo_optim.reference import ReferenceAdamO, ReferenceAngularAdamW

ROOT = Path(__file__).parents[1]
SHAPES = {"general": (5, 4), "turning": (3, 2, 4), "vector": (6,), "one": (1, 1), "zero": (3, 3)}
RULES = dict.fromkeys(SHAPES, "auto") | {"turning": "scale_invariant"}
STEPS = 200


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    with enable_x64(True):
        yield


def start(seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    params = {name: random.standard_normal(shape) for name, shape in SHAPES.items()}
    return params | {"zero": np.zeros(SHAPES["zero"])}


def gradients(steps: int = STEPS) -> dict[str, np.ndarray]:
    """Of all steps; step 7 is zero."""
    random = np.random.default_rng(1)
    result = {k: random.standard_normal((steps, *s)) for k, s in SHAPES.items()}
    for g in result.values():
        g[7:8] = 0
    return result


def run_jax(optimizer: Any, grads: dict[str, np.ndarray], params: Any = None) -> Any:
    """All steps in one ``lax.scan``; every step's weights."""
    params = jax.tree.map(jnp.asarray, start() if params is None else params)

    def step(carry: Any, g: Any) -> Any:
        params, state = carry
        updates, state = optimizer.update(g, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.jit(lambda: jax.lax.scan(step, (params, optimizer.init(params)), grads)[1])()


def run_reference(kind: Any, grads: dict[str, np.ndarray], **options: Any) -> dict[str, np.ndarray]:
    params = {k: torch.nn.Parameter(torch.tensor(w)) for k, w in start().items()}
    groups = [{"params": [p], "rule": RULES[k]} for k, p in params.items()]
    optimizer = kind(groups, **options)
    rows: dict[str, list[np.ndarray]] = {k: [] for k in params}
    for i in range(len(grads["general"])):
        for k, p in params.items():
            p.grad = torch.tensor(grads[k][i])
        optimizer.step()
        for k, p in params.items():
            rows[k].append(p.detach().numpy().copy())
    return {k: np.stack(x) for k, x in rows.items()}


def assert_close(found: Any, expected: Any, rtol: float = 1e-10) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol)


ADAMO: dict[str, dict[str, Any]] = {
    "defaults": {},
    "paper": {"guard": False, "curvature_target": 3.0, "radial_lr": 0.02},
    "no curvature": {"curvature_target": None, "radial_beta": 0.5, "weight_decay": 0.01},
    "isotropic": {"decay_lr": "tangential", "weight_decay": 0.1, "curvature_beta": 0.5},
    "online test": {"delta": 2.0, "wd_ratio": 0.5, "low_dim_scale": 0.3},
    "rows": {"block": "row"},
    "rows, literal": {"block": "row", "guard": False, "curvature_target": 3.0, "delta": 1.0},
    "numbers": {"betas": (0.8, 0.95), "eps": 1e-4, "radial_lr_ratio": 3.0},
    "guarded": {"radial_lr": 5.0, "weight_decay": 0.5, "eps": 0.0},
}
ANGULAR: dict[str, dict[str, Any]] = {
    "defaults": {},
    "initial norm": {"angular_rms": None, "weight_decay": 0.1},
    "numbers": {"betas": (0.8, 0.95), "eps": 1e-3, "angular_rms": 0.5, "max_angle": 0.5},
}
CASES = [pytest.param(adamo, ReferenceAdamO, o, id=f"adamo-{k}") for k, o in ADAMO.items()] + [
    pytest.param(angular_adamw, ReferenceAngularAdamW, o, id=f"angular-{k}")
    for k, o in ANGULAR.items()
]


@pytest.mark.filterwarnings("ignore:weight_decay=")  # AdamO's, in torch
@pytest.mark.parametrize(("make", "reference", "options"), CASES)
def test_it_is_the_reference(make: Any, reference: Any, options: dict[str, Any]) -> None:
    grads = gradients()
    found = run_jax(make(3e-3, rules=RULES, **options), grads)
    assert_close(found, run_reference(reference, grads, lr=3e-3, **options))


BOTH = pytest.mark.parametrize("make", [adamo, angular_adamw])


def test_the_guard_leaves_what_is_not_finite() -> None:
    grads = gradients(20)
    grads["general"][4, 0, 0] = np.inf
    grads["vector"][5, 0] = np.nan
    grads["turning"][6] = np.nan
    found = run_jax(adamo(3e-3, rules=RULES), grads)
    assert_close(found, run_reference(ReferenceAdamO, grads, lr=3e-3))
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))


def test_without_rules_angular_adamw_is_optax_adamw() -> None:
    mask = {name: name == "general" for name in SHAPES}
    ours = angular_adamw(1e-3, weight_decay=0.1, mask=mask)
    theirs = optax.adamw(1e-3, weight_decay=0.1, mask=mask)
    assert_close(run_jax(ours, gradients()), run_jax(theirs, gradients()), 1e-15)


def test_the_norm_stays_in_float32() -> None:
    with enable_x64(False):
        params = {"w": np.float32(start()["general"])}
        grads = {"w": np.float32(np.random.default_rng(0).standard_normal((3000, 5, 4)))}
        rows = run_jax(angular_adamw(rules="scale_invariant"), grads, params)["w"]
    assert rows.dtype == np.float32
    norms = np.linalg.norm(np.asarray(rows, np.float64), axis=(1, 2))
    np.testing.assert_allclose(norms, np.linalg.norm(params["w"]), rtol=1e-6)
    assert np.abs(rows[-1] - rows[0]).max() > 0.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@BOTH
def test_narrow_weights(make: Any, dtype: str) -> None:
    """Near the float64 trajectory, in the weights' own dtype, without float64 anywhere."""
    grads = gradients(20)
    wide = run_jax(make(3e-3, rules=RULES), grads)
    with enable_x64(False):
        params, narrow = jax.tree.map(lambda x: jnp.asarray(x, dtype), (start(), grads))
        found = run_jax(make(3e-3, rules=RULES), narrow, params)
    assert {x.dtype for x in jax.tree.leaves(found)} == {jnp.dtype(dtype)}
    found = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
    assert_close(found, wide, 1e-4 if dtype == "float32" else 0.15)


# ---- optax -------------------------------------------------------------------------------------


@BOTH
def test_a_schedule_and_inject_hyperparams_agree(make: Any) -> None:
    schedule = optax.cosine_decay_schedule(3e-3, 30)
    grads = gradients(30)
    plain = run_jax(make(schedule, rules=RULES), grads)
    injected = optax.inject_hyperparams(make)(schedule, rules=RULES)
    assert_close(run_jax(injected, grads), plain)
    constant = run_jax(make(3e-3, rules=RULES), grads)
    assert np.abs(constant["general"][-1] - plain["general"][-1]).max() > 1e-4


@BOTH
def test_an_injected_number_is_read_in_every_step(make: Any) -> None:
    optimizer = optax.inject_hyperparams(make)(1e-3, rules=RULES)
    params = jax.tree.map(jnp.asarray, start())
    state = optimizer.init(params)
    state.hyperparams["learning_rate"] = jnp.asarray(0.0)
    state.hyperparams["weight_decay"] = jnp.asarray(0.0)
    g = jax.tree.map(jnp.ones_like, params)
    updates, _ = jax.jit(optimizer.update)(g, state, params)
    if make is angular_adamw:
        assert all(np.abs(u).max() == 0 for u in jax.tree.leaves(updates))
    assert np.abs(updates["vector"]).max() == 0


@BOTH
def test_multi_steps_means_the_mean_gradient(make: Any) -> None:
    grads = gradients(20)
    pairs = {k: g.reshape(10, 2, *g.shape[1:]).mean(1) for k, g in grads.items()}
    optimizer = make(3e-3, rules=RULES)
    every = optax.MultiSteps(optimizer, every_k_schedule=2, accumulator_dtype=jnp.float64)
    every = every.gradient_transformation()
    found = jax.tree.map(lambda x: x[1::2], run_jax(every, grads))
    assert_close(found, run_jax(optimizer, pairs))


@BOTH
def test_vmap_trains_models_side_by_side(make: Any) -> None:
    optimizer = make(3e-3, rules=RULES)
    models = [start(seed) for seed in range(3)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *models)
    grads = gradients(5)

    def last(params: Any) -> Any:
        def step(carry: Any, g: Any) -> Any:
            updates, state = optimizer.update(g, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, optimizer.init(params)), grads)[0][0]

    together = jax.jit(jax.vmap(last))(stacked)
    for i, model in enumerate(models):
        expected = jax.tree.map(lambda x: x[-1], run_jax(optimizer, grads, model))
        assert_close(jax.tree.map(lambda x, i=i: x[i], together), expected)


@BOTH
def test_maps_over_the_state(make: Any) -> None:
    """optax.tree_map_params knows which parts of the state are the parameters'."""
    optimizer = make(rules=RULES)
    state = optimizer.init(jax.tree.map(jnp.asarray, start()))
    marked = optax.tree_map_params(optimizer, lambda x: x + 1, state)
    assert jax.tree.structure(marked) == jax.tree.structure(state)
    counts = [x for x in jax.tree.leaves(marked) if x.dtype == jnp.int32]
    assert counts
    assert all(x == 0 for x in counts)


def test_masked_leaves_are_none_of_its_business() -> None:
    mask = dict.fromkeys(SHAPES, True) | {"general": False}
    found = run_jax(optax.masked(adamo(3e-3, rules=RULES), mask), gradients(3))
    whole = run_jax(adamo(3e-3, rules=RULES), gradients(3))
    assert_close(found["turning"], whole["turning"])


@BOTH
def test_a_whole_branch_may_be_another_optimizers(make: Any) -> None:
    """optax puts one MaskedNode in its place, deeper in which there are rules."""
    grads = {k: g[:3] for k, g in gradients().items()}
    params, deep = ({"ours": x, "other": x} for x in (start(), grads))
    parts = {"ours": make(3e-3, rules={"ours": RULES, "other": RULES}), "other": optax.sgd(0.0)}
    apart = run_jax(optax.partition(parts, {"ours": "ours", "other": "other"}), deep, params)
    masked = run_jax(optax.masked(parts["ours"], {"ours": True, "other": False}), deep, params)
    alone = run_jax(make(3e-3, rules=RULES), grads)
    for found in (apart, masked):
        assert_close(found["ours"], alone)
    assert_close(apart["other"], {k: np.stack([w] * 3) for k, w in start().items()})


def test_complex_leaves_are_optax_adamws() -> None:
    params, g = {"w": start()["general"] + 1j}, {"w": gradients()["general"] * (1 + 2j)}
    ours = run_jax(angular_adamw(3e-3, rules="general"), g, params)
    assert_close(ours, run_jax(optax.adamw(3e-3, weight_decay=0.01), g, params), 1e-15)


@BOTH
def test_orbax_round_trip(make: Any, tmp_path: Path) -> None:
    checkpoints = pytest.importorskip("orbax.checkpoint")
    grads, optimizer = gradients(10), make(3e-3, rules=RULES)
    whole = jax.tree.map(lambda x: x[-1], run_jax(optimizer, grads))
    params = jax.tree.map(jnp.asarray, start())
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    for i in range(10):
        if i == 5:
            with checkpoints.StandardCheckpointer() as saver:
                saver.save(tmp_path / "five", {"params": params, "state": state})
                saver.wait_until_finished()
                fresh = {"params": params, "state": jax.jit(optimizer.init)(params)}
                loaded = saver.restore(tmp_path / "five", fresh)
            params, state = loaded["params"], loaded["state"]
        updates, state = update({k: g[i] for k, g in grads.items()}, state, params)
        params = optax.apply_updates(params, updates)
    assert_close(params, whole)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np, optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from adamo_optim.optax import adamo, angular_adamw
jax.config.update("jax_enable_x64", True)
assert len(jax.devices()) == 8
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
random = np.random.default_rng(0)
params = {k: random.standard_normal((8, 16)) for k in "abc"} | {"v": random.standard_normal(8)}
specs = {"a": P("x", "y"), "b": P("x"), "c": P(None, "y"), "v": P("x")}
rules = {"a": "scale_invariant", "b": "general", "c": "auto", "v": "auto"}
place = lambda tree: {k: jax.device_put(x, NamedSharding(mesh, specs[k])) for k, x in tree.items()}

def train(optimizer, place):
    params_now = place(params)
    state = optimizer.init(params_now)
    update = jax.jit(optimizer.update, donate_argnums=1)
    random = np.random.default_rng(1)
    for _ in range(20):
        grads = place({k: random.standard_normal(x.shape) for k, x in params.items()})
        updates, state = update(grads, state, params_now)
        params_now = optax.apply_updates(params_now, updates)
    return params_now, state

for make in (adamo, lambda **o: adamo(block="row", **o), angular_adamw):
    alone, _ = train(make(rules=rules), lambda tree: jax.tree.map(jnp.asarray, tree))
    sharded, state = train(make(rules=rules), place)
    for k in params:
        assert len(sharded[k].sharding.device_set) == 8
        np.testing.assert_allclose(sharded[k], alone[k], rtol=1e-12, atol=1e-12)
    moments = [x for x in jax.tree.leaves(state) if x.shape == (8, 16)]
    assert moments and not any(x.sharding.is_fully_replicated for x in moments)
print("same")
"""


def run_python(code: str, **environment: str) -> str:
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.strip()


def test_sharded_is_unsharded() -> None:
    flags = "--xla_force_host_platform_device_count=8"
    assert run_python(SHARDED, XLA_FLAGS=flags) == "same"


# ---- rules -------------------------------------------------------------------------------------


def batch_norm(x: Any, eps: float = 1e-5) -> Any:
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + eps)


def network(p: Any, x: Any) -> Any:
    """Every kind of leaf that is easily taken for another."""
    h = jnp.tanh(batch_norm(x @ p["before_norm"]) * p["gain"])
    q = h @ p["query"]
    q = q / jnp.sqrt((q * q).mean(-1, keepdims=True) + 1e-6)
    h = h + q @ p["zero_branch"]
    residual = batch_norm(h + h @ p["in_residual"])
    return {"logits": residual @ p["head"], "count": jnp.arange(3)}


def network_params() -> dict[str, Any]:
    random = np.random.default_rng(0)
    names = ("before_norm", "query", "zero_branch", "in_residual", "head", "unused")
    params: dict[str, Any] = {k: np.float32(random.standard_normal((6, 6)) / 6**0.5) for k in names}
    return params | {"gain": np.ones(6, np.float32), "zero_branch": np.zeros((6, 6), np.float32)}


@pytest.mark.parametrize("x64", [False, True])
def test_find_rules(x64: bool) -> None:
    x = np.float32(np.random.default_rng(1).standard_normal((32, 6)))
    with enable_x64(x64):
        rules = find_rules(network, network_params(), x)
    turning = {k for k, rule in rules.items() if rule == "scale_invariant"}
    assert turning == {"before_norm", "query"}
    assert {k for k, rule in rules.items() if rule == "low_dim"} == {"gain"}


def saturated(p: Any, x: Any) -> Any:
    """Attention whose weights, made larger, become a choice: no gradient is left."""
    weights = jax.nn.softmax((x @ p["query"]) @ (x @ p["key"]).T)
    y = weights @ x
    return batch_norm(y @ p["before_norm"]) @ p["head"]


@pytest.mark.parametrize("seed", range(8))
def test_a_leaf_that_saturates_is_general_and_hides_no_other(seed: int) -> None:
    random = np.random.default_rng(seed)
    names = ("query", "key", "before_norm", "head")
    params = {k: np.float32(random.standard_normal((32, 32)) / 32**0.5) for k in names}
    x = np.float32(random.standard_normal((16, 32)))
    rules = find_rules(saturated, params, x)
    assert [k for k, rule in rules.items() if rule == "scale_invariant"] == ["before_norm"]
    steep = find_rules(lambda p, x: jax.nn.sigmoid(10 * x @ p["query"]) @ p["head"], params, x)
    assert "scale_invariant" not in steep.values()


def test_a_zero_leaf_before_a_norm_is_general() -> None:
    params = network_params()
    params["query"] = np.zeros_like(params["query"])
    x = np.float32(np.random.default_rng(1).standard_normal((32, 6)))
    assert find_rules(network, params, x)["query"] == "general"
    with pytest.raises(ValueError, match=r"leaf \['query'\] has the rule .* and is 0"):
        angular_adamw(rules=dict.fromkeys(params, "auto") | {"query": "scale_invariant"}).init(
            params
        )


def test_an_eps_that_is_felt_makes_a_leaf_general() -> None:
    params = {"w": np.float32(np.random.default_rng(0).standard_normal((6, 6)))}
    x = np.random.default_rng(1).standard_normal((32, 6))
    for eps, rule in ((1e-5, "scale_invariant"), (10.0, "general")):
        found = find_rules(lambda p, x, e=eps: batch_norm(x @ p["w"], e), params, x)
        assert found == {"w": rule}


@pytest.mark.parametrize("x64", [False, True])
def test_find_rules_keeps_what_is_not_real(x64: bool) -> None:
    def f(p: Any, x: Any) -> Any:
        x = jnp.where(p["keep"], x[:, p["columns"]], 0.0)
        x = x + jax.random.normal(p["key"], x.shape)
        y = jnp.fft.ifft(jnp.fft.fft(x) @ p["filter"] * p["phase"]).real
        assert jnp.iscomplexobj(p["filter"])
        return jnp.fft.rfft(batch_norm(y @ p["before_norm"]))

    random = np.random.default_rng(0)
    matrix = np.float32(random.standard_normal((6, 6)))
    with enable_x64(x64):
        params = {
            "before_norm": matrix,
            "filter": np.complex64(matrix + 1j * matrix.T),
            "phase": np.exp(1j * np.arange(6)),
            "columns": np.arange(6)[::-1],
            "keep": np.eye(6, dtype=bool)[:2].any(0),
            "key": jax.random.key(0),
        }
        found = find_rules(f, params, np.float32(random.standard_normal((32, 6))))
    names = ("columns", "keep", "key", "phase")
    turning = {"before_norm": "scale_invariant", "filter": "general"}
    assert found == dict.fromkeys(names, "low_dim") | turning


# ---- mistakes ----------------------------------------------------------------------------------


def find(f: Any = lambda p, x: x @ p["w"], x: Any = 1.0, w: Any = 1.0, **options: Any) -> Any:
    return find_rules(f, {"w": w * np.ones((6, 3))}, x * np.ones((2, 6)), **options)


MISTAKES = [
    (lambda: adamo(-1.0), "learning_rate must be >= 0, got -1.0"),
    (lambda: adamo(betas=(0.9, 1.0)), r"betas\[1\] must be >= 0 and < 1, got 1.0"),
    (lambda: adamo(betas=0.9), "betas must be a pair of numbers, got 0.9"),
    (lambda: adamo(block="column"), "block must be one of 'tensor', 'row', got 'column'"),
    (lambda: adamo(guard=1), "guard must be True or False, got 1"),
    (lambda: angular_adamw(max_angle=2.0), "max_angle must be > 0 and <= 1.5708, got 2.0"),
    (lambda: adamo(rules="turns").init(start()), r"rule of leaf \['general'\] must be one of"),
    (
        lambda: adamo(rules={"a": "auto"}).init(start()),
        r"is none for \['general'\]; .* no parameter",
    ),
    (lambda: angular_adamw(rules=RULES | {"turning": None}).init(start()), r"for \['turning'\]$"),
    (lambda: adamo().update(start(), adamo().init(start())), "update needs params"),
    (lambda: find(f=start()), "f must be a function of .params, .inputs., got dict"),
    (lambda: find(trials=0), "trials must be an integer >= 1, got 0"),
    (lambda: find(tolerance=-1.0), "tolerance must lie between 0 and 1, got -1.0"),
    (lambda: find(x=np.full((2, 6), np.nan)), r"inputs\[0\] has NaN or infinity"),
    (lambda: find(w=np.full((6, 3), np.inf)), r"params\['w'\] has NaN or infinity"),
    (lambda: find(f=lambda p, x: jnp.arange(3)), "f returned no floating array"),
    (lambda: jax.jit(lambda w: find(w=w) and w)(np.ones((6, 3))), "call it outside of jit"),
    (lambda: adamo().init({"z": np.ones((2, 2), complex)}), r"\['z'\] is complex128, not real"),
    (lambda: adamo().init({"n": np.arange(2)}), r"leaf \['n'\] is int64, not real floating"),
    (
        lambda: angular_adamw(rules="scale_invariant").init({"z": np.ones((2, 2), complex)}),
        r"leaf \['z'\] is complex128, not real",
    ),
]


@pytest.mark.parametrize(("call", "message"), MISTAKES)
def test_mistakes_get_a_sentence(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# ---- the package without torch -----------------------------------------------------------------


def test_torch_is_not_imported() -> None:
    code = "import sys, adamo_optim.optax; print('torch' in sys.modules)"
    assert run_python(code) == "False"


def test_it_works_where_torch_cannot_be_imported() -> None:
    code = """
import sys
sys.modules["torch"] = None
import jax.numpy as jnp
import adamo_optim
from adamo_optim.optax import adamo, angular_adamw, find_rules
params = {"w": jnp.ones((2, 3)) + jnp.eye(2, 3)}
rules = find_rules(lambda p: p["w"] / jnp.linalg.norm(p["w"]), params)
for make in (adamo, angular_adamw):
    optimizer = make(rules=rules)
    optimizer.update(params, optimizer.init(params), params)
assert not hasattr(adamo_optim, "unknown")
try:
    adamo_optim.AdamO
except ImportError as error:
    assert str(error).startswith("AdamO needs torch: pip install torch."), error
    print(rules["w"], adamo_optim.__version__)
"""
    assert run_python(code).split()[0] == "scale_invariant"


def test_the_lazy_package_looks_as_before() -> None:
    code = """
import adamo_optim
hidden = {"Any", "TYPE_CHECKING", "importlib"}
names = set(dir(adamo_optim))
assert {*adamo_optim.__all__, "__version__"} <= names and not names & hidden, names
assert adamo_optim.law.Memory._fields[0] == "step"  # a submodule, without an import of its own
from adamo_optim import *
print(AdamO.__module__, AngularAdamW is adamo_optim.AngularAdamW, param_groups, rebind)
"""
    assert run_python(code).startswith("adamo_optim.adamo True <function param_groups")
    import adamo_optim

    assert pickle.loads(pickle.dumps(adamo_optim.AdamO)) is adamo_optim.AdamO


# ---- the example -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["angular", "adamo"])
def test_the_example_trains(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("flax")
    spec = importlib.util.spec_from_file_location("flax_nnx", ROOT / "examples" / "flax_nnx.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with enable_x64(False):
        losses = module.train(name, 150)
    assert losses[-1] < 0.5 * losses[0]
    told = capsys.readouterr().out
    assert "conv.kernel scale_invariant" in told
    assert "head.kernel general" in told
