"""In the trainers people use: the examples run, resume bit for bit and do what they say."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from adamo_optim import AdamO, AngularAdamW, param_groups
from adamo_optim.callbacks import log_diagnostics
from test_callbacks import scalars

EXAMPLES = Path(__file__).parents[1] / "examples"
BOTH = pytest.mark.parametrize("kind", [AdamO, AngularAdamW])
MISTAKES = pytest.mark.parametrize(
    ("options", "error"), [({"every": 0}, ValueError), ({"quantity": ["angle"]}, TypeError)]
)

pytestmark = [
    pytest.mark.slow,  # each of these libraries takes about ten seconds to import
]


def example(name: str, *libraries: str) -> Any:
    """An example as a module, or a skip where a library it needs cannot be imported."""
    for library in libraries:
        try:
            importlib.import_module(library)
        except (ImportError, RuntimeError) as error:  # torchvision of another torch: RuntimeError
            pytest.skip(f"{library}: {error}".splitlines()[0])
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_main(module: Any, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", [module.__name__, *map(str, arguments)])
    module.main()


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---- transformers ---------------------------------------------------------------------------


def hf_arguments(folder: Path, **changes: Any) -> Any:
    from transformers import TrainingArguments

    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 0.5,
        "bf16": True,
        "learning_rate": 2e-3,
        "weight_decay": 5e-4,
        "save_steps": 3,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 1,
    }
    return TrainingArguments(**{**settings, **changes})


def hf_trainer(module: Any, args: Any, way: str) -> Any:
    """The Trainer with an optimizer that was built, or with a class."""
    from transformers import Trainer

    if way == "AngularAdamW":
        return module.make_trainer(args)
    model, data = module.make_model(), module.make_data()
    if way == "AdamO":
        batch = {"input_ids": torch.stack([row["input_ids"] for row in data[:2]])}
        groups = param_groups(model, batch, forward=lambda m, b: m(**b, use_cache=False).logits)
        pair = (AdamO(groups, lr=args.learning_rate), None)
        return Trainer(model, args, train_dataset=data, optimizers=pair)
    cls_and_kwargs = (AdamO, {"lr": args.learning_rate})
    return Trainer(model, args, train_dataset=data, optimizer_cls_and_kwargs=cls_and_kwargs)


@pytest.mark.parametrize("way", ["AngularAdamW", "AdamO", "AdamO's class"])
def test_transformers_resumes_bit_for_bit(tmp_path: Path, way: str) -> None:
    module = example("huggingface_trainer", "transformers", "accelerate")
    from transformers import TrainerCallback

    sizes = []

    class Clipped(TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, model: nn.Module, **kwargs: Any) -> None:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            sizes.append(nn.utils.get_total_norm(grads).item())

    whole = hf_trainer(module, hf_arguments(tmp_path), way)
    whole.add_callback(Clipped())
    whole.train()
    resumed = hf_trainer(module, hf_arguments(tmp_path), way)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    # Accumulation: one step for two batches. Clipping: what the optimizer saw.
    optimizer = whole.optimizer.optimizer
    assert {state["step"].item() for state in optimizer.state.values()} == {6.0}
    assert len(sizes) == 6
    assert max(sizes) <= 0.5 + 1e-4
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]


def test_transformers_rules_reach_the_optimizer(tmp_path: Path) -> None:
    module = example("huggingface_trainer", "transformers", "accelerate")
    built = hf_trainer(module, hf_arguments(tmp_path), "AngularAdamW")
    rules = {row.name: row.rule for row in built.optimizer.explain()}
    assert rules["model.layers.0.self_attn.q_proj.weight"] == "scale_invariant"
    assert rules["model.layers.0.self_attn.v_proj.weight"] == "general"
    assert rules["model.norm.weight"] == "low_dim"
    # weight_decay and learning_rate of TrainingArguments do not reach it ...
    assert {(g["lr"], g["weight_decay"]) for g in built.optimizer.param_groups} == {(1e-3, 0.1)}
    # ... and do the other way, where rules go by shape
    by_class = hf_trainer(module, hf_arguments(tmp_path), "AdamO's class").create_optimizer()
    assert isinstance(by_class, AdamO)
    assert [group["weight_decay"] for group in by_class.param_groups] == [5e-4, 0.0]
    assert {row.rule for row in by_class.explain()} == {"general", "low_dim"}
    from transformers import Trainer

    pair = (AngularAdamW, {"lr": 1e-3})
    trainer = Trainer(module.make_model(), built.args, optimizer_cls_and_kwargs=pair)
    with pytest.warns(UserWarning, match=r"nothing turns.*AngularAdamW\(param_groups\("):
        trainer.create_optimizer()


@BOTH
def test_transformers_callback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: Any
) -> None:
    module = example("huggingface_trainer", "transformers", "accelerate", "tensorboard")
    from adamo_optim.callbacks import transformers_callback

    args = hf_arguments(tmp_path, report_to="tensorboard", save_strategy="no")
    trainer = hf_trainer(module, args, kind.__name__)
    trainer.add_callback(transformers_callback(trainer, every=2, prefix="two"))
    trainer.train()
    (folder,) = {path.parent for path in tmp_path.rglob("events.out*")}
    events = scalars(folder)["train/two/norm/model.layers.0.self_attn.q_proj.weight"]
    assert [event.step for event in events] == [2, 4, 6]
    assert "two/norm" not in capsys.readouterr().out
    assert not any("two/" in key for entry in trainer.state.log_history for key in entry)


@MISTAKES
def test_transformers_callback_tells_mistakes_at_once(options: Any, error: Any) -> None:
    example("huggingface_trainer", "transformers", "accelerate")
    from adamo_optim.callbacks import transformers_callback

    with pytest.raises(error, match=r"every must be|quantity"):
        transformers_callback(None, **options)


@pytest.mark.parametrize("flags", [[], ["--by-class"]], ids=["built", "by class"])
def test_transformers_example(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    module = example("huggingface_trainer", "transformers", "accelerate", "tensorboard")
    run_main(module, monkeypatch, "--steps", 20, "--out", tmp_path, *flags)
    out = capsys.readouterr().out
    assert "scale-invariant by Euler's identity" in out
    assert "turns: " in out
    lines = [line for line in out.splitlines() if line.startswith("{'loss'")]
    assert lines[1] == lines[2]  # steps 11 to 20, and the same resumed


# ---- Accelerate -----------------------------------------------------------------------------


def test_accelerate_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("accelerate_loop", "accelerate")
    run_main(module, monkeypatch, "--epochs", 2, "--out", tmp_path)
    assert "the same, bit for bit" in capsys.readouterr().out
    saved = torch.load(tmp_path / "epoch-2" / "optimizer.bin", weights_only=True)
    assert {state["step"].item() for state in saved["state"].values()} == {16.0}  # 32 batches


@BOTH
def test_accelerate_clips_what_a_step_sees_and_logs_through_the_wrapper(
    tmp_path: Path, kind: Any
) -> None:
    pytest.importorskip("accelerate")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)  # another test may have chosen a GPU for this process
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("run")
    model = nn.Sequential(nn.Linear(4, 2, bias=False), nn.BatchNorm1d(2), nn.Linear(2, 2))
    groups = param_groups(model, torch.randn(8, 4))
    model, optimizer = accelerator.prepare(model, kind(groups))
    accelerator.backward(model(torch.randn(8, 4)).square().sum() * 1e3)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    grads = {name: float(p.grad.norm()) for name, p in model.named_parameters()}
    assert sum(x**2 for x in grads.values()) == pytest.approx(1.0, rel=1e-4)
    rows = optimizer.optimizer.diagnostics(synchronize=True)
    assert rows.keys() == (grads.keys() if kind is AdamO else {"0.weight"})
    for name, row in rows.items():
        assert row["gradient_norm"] == pytest.approx(grads[name], rel=1e-5)
    assert log_diagnostics(optimizer, accelerator, 100)
    accelerator.end_training()
    assert "adamo/norm/0.weight" in scalars(tmp_path / "run")


# ---- Lightning ------------------------------------------------------------------------------

LIGHTNING_WARNINGS = (
    "ignore:.*does not have many workers",
    "ignore:The dirpath has changed",
    "ignore:.*LeafSpec",
)
lightning = pytest.mark.filterwarnings(*LIGHTNING_WARNINGS)


@lightning
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_lightning_resumes_bit_for_bit(tmp_path: Path, manual: bool, precision: str) -> None:
    module = example("lightning_module", "lightning", "tensorboard")
    settings = (2, str(tmp_path), manual, precision)
    whole = module.train(*settings)
    half = module.train(*settings, stop=1)
    resumed = module.train(*settings, resume=half.checkpoint_callback.best_model_path)
    assert_same(whole.model.state_dict(), resumed.model.state_dict())
    rows = whole.optimizers[0].diagnostics(synchronize=True)
    assert sum(row["gradient_norm"] ** 2 for row in rows.values()) <= 1.0 + 1e-3
    assert whole.callback_metrics["loss"] < half.callback_metrics["loss"]
    events = scalars(whole.logger.log_dir)["adamo/norm/0.weight"]
    assert [event.step for event in events] == [16, 32]


@lightning
@BOTH
def test_lightning_does_not_clip_for_fused_backends_under_mixed_precision(kind: Any) -> None:
    """Why the example does not say fused=True, for any optimizer."""
    module = example("lightning_module", "lightning", "tensorboard")

    class Fused(module.Classifier):
        def configure_optimizers(self) -> Any:
            return kind([{"params": self.net.parameters(), "rule": "general"}], fused=True)

    fused = {row.backend for row in AdamO(nn.Linear(2, 2).parameters()).explain()} == {"fused"}
    if not fused and kind is AdamO:
        pytest.skip("the native kernel was not built")
    loader = module.make_loader()
    net = Fused(next(iter(loader))[0], 1)
    trainer = module.L.Trainer(
        max_steps=1, precision="bf16-mixed", gradient_clip_val=1.0, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        trainer.fit(net, loader)


@MISTAKES
def test_lightning_callback_tells_mistakes_at_once(options: Any, error: Any) -> None:
    pytest.importorskip("lightning")
    from adamo_optim.callbacks import lightning_callback

    with pytest.raises(error, match=r"every must be|quantity"):
        lightning_callback(**options)


@lightning
def test_lightning_float16(tmp_path: Path) -> None:
    module = example("lightning_module", "lightning", "tensorboard")
    if not torch.cuda.is_available():
        pytest.skip("Lightning's float16 and its GradScaler need a GPU: on a CPU it takes bfloat16")
    trainer = module.train(2, str(tmp_path), False, "16-mixed")
    assert trainer.precision_plugin.scaler is not None
    assert trainer.callback_metrics["loss"] < 1.0


@lightning
def test_lightning_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("lightning_module", "lightning", "tensorboard")
    run_main(module, monkeypatch, "--epochs", 2, "--manual", "--out", tmp_path)
    assert "resumed:\nepoch 2" in capsys.readouterr().out


# ---- timm -----------------------------------------------------------------------------------


@BOTH
def test_timm_factory_makes_ours_with_its_own_groups(kind: Any) -> None:
    example("timm_classifier", "timm")
    import timm
    from timm.optim import create_optimizer_v2, list_optimizers

    from adamo_optim.integrations.timm import register

    register()
    register()
    assert {"adamo", "angularadamw"} <= set(list_optimizers())
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=4, embed_dim=8, depth=1, num_heads=2
    )
    settings = {"lr": 1e-3, "weight_decay": 5e-4, "betas": (0.8, 0.9), "eps": 1e-6}
    if kind is AdamO:
        optimizer = create_optimizer_v2(model, opt="adamo", guard=False, **settings)
    else:
        with pytest.warns(UserWarning, match="nothing turns"):
            optimizer = create_optimizer_v2(model, opt="angularadamw", **settings)
    assert isinstance(optimizer, kind)
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decay[model.pos_embed] == 0.0  # model.no_weight_decay()
    assert decay[model.head.weight] == 5e-4
    group = optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group.get("guard")) == (
        (0.8, 0.9),
        1e-6,
        False if kind is AdamO else None,
    )


@pytest.mark.parametrize("name", ["adamo", "angularadamw"])
def test_timm_layer_decay_scales_both_step_sizes(name: str) -> None:
    module = example("timm_classifier", "timm")
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler

    from adamo_optim.integrations.timm import param_group_fn, register

    images, labels = module.make_data(32)
    model = module.make_model()
    register()
    groups = param_group_fn(images[:8], weight_decay=1e-3, layer_decay=0.8)
    optimizer = create_optimizer_v2(model, opt=name, lr=3e-4, param_group_fn=groups)
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    scheduler = CosineLRScheduler(optimizer, t_initial=10, t_in_epochs=False)
    scheduler.step_update(0)
    F.cross_entropy(model(images), labels).backward()
    optimizer.step()
    rates = {name: g["lr"] for g in optimizer.param_groups for name in g["param_names"]}
    assert rates["fc.weight"] == pytest.approx(3e-4)
    assert rates["conv1.0.weight"] < 0.5 * rates["fc.weight"]
    for key, row in optimizer.diagnostics(synchronize=True).items():
        if name == "angularadamw":  # the first step: m̂/√ŝ is g over its own root mean square
            asked = rates[key] / 0.015 if row["gradient_norm"] else 0.0  # a gain of 0 follows
            assert row["angle"] == pytest.approx(asked, rel=1e-3)
            norm = model.get_parameter(key).norm().item()
            assert norm == pytest.approx(start[key].norm().item(), rel=1e-5)
        elif row["eta_radial"] == row["eta_radial"]:  # not low-dim
            assert row["eta_radial"] == pytest.approx(100 * rates[key])
    rules = {row.name: row.rule for row in optimizer.explain()}
    assert rules["layer1.0.conv1.weight"] == "scale_invariant"
    assert rules["fc.weight"] == "general"


def test_timm_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("timm_classifier", "timm")
    run_main(module, monkeypatch, "--epochs", 2)
    first, last = (line for line in capsys.readouterr().out.splitlines() if line[:4] == "step")
    assert float(last.split()[3].strip(",")) < float(first.split()[3].strip(","))


# ---- plain PyTorch and PEFT -----------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [["--no-compile"], [], ["--no-compile", "--optimizer", "adamo"]],
    ids=["eager", "compiled", "adamo"],
)
def test_plain_example(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    module = example("plain_pytorch", "tensorboard")
    run_main(module, monkeypatch, "--epochs", 2, "--out", tmp_path, *flags)
    assert "the same, bit for bit" in capsys.readouterr().out
    # the run that goes on has a file of its own, and TensorBoard may read either first
    events = scalars(tmp_path)["adamo/norm/0.weight"]
    assert sorted(event.step for event in events) == [16, 32, 32]


@BOTH
def test_grad_scaler_on_a_cpu_unscales_clips_and_skips(kind: Any) -> None:
    """The loop of plain_pytorch.py with its GradScaler enabled, which it is on a GPU only."""
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8))
    model = nn.Sequential(*hidden, nn.ReLU(), nn.Linear(8, 2))
    x = torch.randn(16, 4)
    optimizer = kind(param_groups(model, x))
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    for overflow in (False, True, False):
        before = [p.detach().clone() for p in model.parameters()]
        optimizer.zero_grad()
        scaler.scale(model(x).square().sum()).backward()
        if overflow:
            for p in model.parameters():
                p.grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        same = [torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert all(same) if overflow else not any(same)
    rows = optimizer.diagnostics(synchronize=True)
    assert sum(row["gradient_norm"] ** 2 for row in rows.values()) <= 1.0 + 1e-4


# peft 0.21 asks transformers 5.23 for it
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_b_trains_and_the_base_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("peft_lora", "peft", "transformers")
    model = module.make_model()
    base = {n: p.detach().clone() for n, p in model.named_parameters() if not p.requires_grad}
    optimizer = module.make_optimizer(model)
    losses = module.train(model, optimizer, steps=20)
    assert losses[-1] < losses[0]
    after = dict(model.named_parameters())
    assert_same(base, {name: after[name].detach() for name in base})
    for row in optimizer.explain():
        if "lora_B" in row.name:
            assert row.rule == "low_dim"
            assert "its norm was 0 at its first step" in row.reason
            assert after[row.name].norm() > 0.01
        else:
            assert row.rule == "general"
    run_main(module, monkeypatch, "--steps", 20)
    assert "base weights that moved: 0 of" in capsys.readouterr().out
