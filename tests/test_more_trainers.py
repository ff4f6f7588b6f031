"""By class or by string: transformers, axolotl, torchtitan, Ultralytics, LitGPT, Hydra; FSDP2.

axolotl, torchtitan, Ultralytics and LitGPT are not part of the development environment: these tests
are skipped where they are missing.
"""

from __future__ import annotations

import copy
import importlib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import distributed_kit
from adamo_optim import AdamO, AngularAdamW, param_groups
from test_how_trainers_behave import batch, network, train
from test_trainers import BOTH, assert_same, example, hf_arguments, run_main

pytestmark = pytest.mark.slow  # each of these libraries takes seconds to import
QUERY = "model.layers.0.self_attn.q_proj.weight"


def rules(optimizer: Any) -> dict[str, str]:
    return {row.name: row.rule for row in optimizer.explain()}


# ---- transformers and axolotl ---------------------------------------------------------------


@BOTH
def test_transformers_makes_groups_of_the_model(tmp_path: Path, kind: Any) -> None:
    module = example("huggingface_trainer", "transformers", "accelerate")
    from transformers import Trainer

    from adamo_optim.integrations.transformers import FromModel

    def trainer() -> Any:
        settings = {"optimizer": kind, "lr": 1e-3, "weight_decay": 1e-3}
        return Trainer(
            module.make_model(), hf_arguments(tmp_path), train_dataset=module.make_data(),
            optimizer_cls_and_kwargs=(FromModel, settings),
        )  # fmt: skip

    whole, resumed = trainer(), trainer()
    optimizer = trainer().create_optimizer()
    assert isinstance(optimizer, kind)
    assert rules(optimizer)[QUERY] == "scale_invariant"
    decay = {g["rule"]: g["weight_decay"] for g in optimizer.param_groups}
    assert decay == {"scale_invariant": 1e-3, "general": 1e-3, "low_dim": 0.0}
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(whole.model.state_dict(), resumed.model.state_dict())


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,  # features of a layer this narrow exceed the eps of its norms
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
NONE, QUERIES = [], ["k_proj", "q_proj"]
REST = ["down_proj", "o_proj", "up_proj", "v_proj"]
# what turns in every layer, as docs/rules.md says
FAMILIES = {
    "Llama": NONE,
    "Mistral": NONE,
    "Qwen2": NONE,
    "Phi3": NONE,
    "Qwen3": QUERIES,
    "Gemma2": REST,
    "Gemma3Text": sorted(QUERIES + REST),
    "Olmo2": sorted(QUERIES + REST),
    "Olmo3": sorted(QUERIES + REST),
    "Exaone4": sorted(QUERIES + REST),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_turns_in_well_known_models(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    from adamo_optim.integrations.transformers import FromModel

    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    optimizer = FromModel()(model, lr=1e-3)
    turning = [name for name, rule in rules(optimizer).items() if rule == "scale_invariant"]
    assert sorted({name.split(".")[-2] for name in turning}) == FAMILIES[family]
    assert len(turning) == 2 * len(FAMILIES[family])


def test_transformers_asks_for_a_batch_where_there_are_no_tokens() -> None:
    from adamo_optim.integrations.transformers import FromModel

    with pytest.raises(ValueError, match=r"Sequential has no config.vocab_size.*example_batch"):
        FromModel()(network())
    optimizer = FromModel()(network(), example_batch=batch(0), lr=1e-3)
    assert rules(optimizer)["0.weight"] == "scale_invariant"


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (network(), {"optimizer": "AdamO"}, "optimizer must be AngularAdamW or AdamO, got 'AdamO'"),
        (network(), {"optimizer": torch.optim.AdamW}, "must be AngularAdamW or AdamO, got <class"),
        (None, {}, "model must be a torch.nn.Module, got NoneType"),
    ],
    ids=["text", "AdamW", "no model"],
)
def test_transformers_mistakes(model: Any, options: dict[str, Any], message: str) -> None:
    from adamo_optim.integrations.transformers import FromModel

    with pytest.raises(ValueError, match=message):
        FromModel()(model, **options)


def test_random_tokens_leave_model_and_random_state() -> None:
    module = example("huggingface_trainer", "transformers")
    from adamo_optim.integrations.transformers import FromModel

    model = module.make_model()
    kept, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    attention = model.config._attn_implementation
    assert attention != "eager"  # which the float64 copy is examined with
    FromModel()(model)
    assert model.config._attn_implementation == attention
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(kept, model.state_dict())


@pytest.mark.filterwarnings("ignore:.gradient_checkpointing_enable:FutureWarning")
def test_transformers_mixture_of_experts_with_checkpointing() -> None:
    """Experts in groups take no float64, and checkpointed layers are computed once more."""
    transformers = pytest.importorskip("transformers")
    from adamo_optim.integrations.transformers import FromModel

    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
        num_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config)
    model.gradient_checkpointing_enable()
    assert config._experts_implementation != "eager"
    assert rules(FromModel()(model))[QUERY] == "scale_invariant"
    assert config._experts_implementation != "eager"


def test_transformers_encoder_and_decoder() -> None:
    transformers = pytest.importorskip("transformers")
    from adamo_optim.integrations.transformers import FromModel

    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2
    )
    model = transformers.T5ForConditionalGeneration(config)
    assert set(rules(FromModel()(model, optimizer=AdamO)).values()) == {"general", "low_dim"}


def importable(name: str) -> Any:
    """A module, with its own warnings left out, or a skip where it cannot be imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return importlib.import_module(name)
        except (ImportError, RuntimeError) as error:  # torchvision of another torch: RuntimeError
            pytest.skip(f"{name}: {error}".splitlines()[0])


def test_axolotl_plugin(tmp_path: Path) -> None:
    base = importable("axolotl.integrations.base")
    mixin = importable("axolotl.core.trainers.mixins.optimizer")
    module = example("huggingface_trainer", "transformers", "accelerate")

    manager = base.PluginManager.get_instance()
    name = "adamo_optim.integrations.axolotl.AngularAdamWPlugin"
    manager.register(name)
    assert name in manager.plugins  # a plug-in that cannot be loaded is only logged
    args = hf_arguments(tmp_path, max_steps=2, save_strategy="no")
    for field in ("loraplus_lr_ratio", "embedding_lr_scale", "embedding_lr", "lr_groups"):
        setattr(args, field, None)  # AxolotlTrainingArguments' defaults
    trainer = mixin.OptimizerMixin(module.make_model(), args, train_dataset=module.make_data())
    with pytest.raises(ValueError, match="optim_args must be a mapping"):
        manager.post_trainer_create({"optim_args": "max_angle=0.1"}, trainer)
    args.embedding_lr = 1e-4
    with pytest.raises(ValueError, match="AngularAdamWPlugin has no embedding_lr"):
        manager.post_trainer_create({}, trainer)
    args.embedding_lr = None
    manager.post_trainer_create({"optim_args": {"max_angle": 0.1}}, trainer)
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, AngularAdamW)
    assert rules(optimizer)[QUERY] == "scale_invariant"
    assert {g["initial_lr"] for g in optimizer.param_groups} == {args.learning_rate}
    assert {g["weight_decay"] for g in optimizer.param_groups} == {args.weight_decay, 0.0}
    assert {g["max_angle"] for g in optimizer.param_groups} == {0.1}


# ---- torchtitan, LitGPT, Hydra --------------------------------------------------------------


@BOTH
def test_torchtitan_container(kind: Any) -> None:
    importable("torchtitan.components.optimizer")
    module = example("torchtitan_container")
    model, other = network(), network()
    container = module.build(model, kind.__name__)
    assert type(container) is module.Container  # Config.build() makes the class it is nested in
    assert rules(container.optimizers[0])["0.weight"] == "scale_invariant"
    train(model, range(4), container)
    saved = copy.deepcopy(container.state_dict())
    assert saved["param_groups.0.weight.rule"] == "scale_invariant"
    other.load_state_dict(model.state_dict())
    resumed = module.build(other, kind.__name__)
    resumed.load_state_dict(saved)
    train(model, range(4, 8), container)
    train(other, range(4, 8), resumed)
    assert_same(model.state_dict(), other.state_dict())


def test_torchtitan_example(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    importable("torchtitan.components.optimizer")
    run_main(example("torchtitan_container"), monkeypatch)
    out = capsys.readouterr().out
    assert "resumed: the same, bit for bit" in out
    first, last = map(float, out.split("loss ")[1].splitlines()[0].split(" -> "))
    assert last < 0.5 * first


def test_ultralytics_example(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path))
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    importable("ultralytics.models.yolo.detect")
    importable("torchvision.ops")  # which its validation needs
    module = example("ultralytics_trainer")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = module.make_trainer(tmp_path, epochs=2)
        trainer.save_period = 1
        trainer.train()
    optimizer = trainer.optimizer
    assert isinstance(optimizer, AngularAdamW)
    found = rules(optimizer)
    assert found["model.0.conv.weight"] == "scale_invariant"
    assert found["model.23.cv3.0.2.weight"] == "general"  # the last layer, which no norm follows
    assert list(found.values()).count("scale_invariant") == 81
    decay = {(g["param_group"], g["weight_decay"]) for g in optimizer.param_groups}
    assert decay == {("weight", 5e-4), ("bn", 0.0), ("bias", 0.0)}
    # interrupted and resumed: its checkpoint holds float16 for what it does not know by name
    args = {**vars(trainer.args), "resume": str(tmp_path / "run" / "weights" / "epoch0.pt")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed = module.Trainer(overrides=args)
        resumed.train()
    steps = {int(state["step"]) for state in resumed.optimizer.state.values()}
    assert steps == {8}


@BOTH
def test_litgpt_by_string(kind: Any) -> None:
    """It passes bare parameters: rules by shape. Its q, k and v are one weight: nothing turns."""
    utils, litgpt = importable("litgpt.utils"), importable("litgpt.model")
    config = litgpt.Config(
        n_layer=1, n_head=2, n_embd=16, block_size=16, vocab_size=32, norm_qk=True,
        norm_class_name="RMSNorm", head_size=8, rotary_percentage=1.0,
    )  # fmt: skip
    model = litgpt.GPT(config)
    make = utils.instantiate_torch_optimizer
    flags = {"fused": False, "lr": 1e-3, "weight_decay": 1e-3, "betas": (0.9, 0.95), "foo": 1}
    name = f"adamo_optim.{kind.__name__}"
    if kind is AngularAdamW:
        with pytest.warns(UserWarning, match="nothing turns"):
            optimizer = make(name, model.parameters(), **flags)
    else:
        optimizer = make(name, model.parameters(), **flags)
    assert isinstance(optimizer, kind)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    found = {row.rule for row in kind(param_groups(model, torch.randint(32, (2, 16)))).explain()}
    assert found == {"general", "low_dim"}


def test_hydra_example(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = example("hydra_config", "hydra", "omegaconf")
    run_main(module, monkeypatch)
    out = capsys.readouterr().out
    assert "turns: scale-invariant" in out
    first, last = (line for line in out.splitlines() if line.startswith("step"))
    assert float(last.split()[-1]) < float(first.split()[-1])


@BOTH
def test_hydra_configurations(kind: Any) -> None:
    """By `_partial_`: else Hydra makes configurations of the groups. Betas become a tuple."""
    pytest.importorskip("hydra")
    from hydra.errors import InstantiationException
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    node = OmegaConf.create({"_target_": f"adamo_optim.{kind.__name__}", "betas": [0.9, 0.95]})
    groups = param_groups(network(), batch(0))
    with pytest.raises(InstantiationException, match="can only optimize Tensors"):
        instantiate(node, params=groups)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no group says which weights are scale-invariant")
        assert isinstance(instantiate(node, params=network().parameters()), kind)
    optimizer, by_hand = instantiate(node, _partial_=True)(groups), kind(groups, betas=node.betas)
    assert isinstance(optimizer, kind)
    for group, other in zip(optimizer.param_groups, by_hand.param_groups, strict=True):
        assert group["betas"] == other["betas"] == (0.9, 0.95)
        assert type(group["betas"]) is type(other["betas"]) is tuple
    assert rules(optimizer)["0.weight"] == "scale_invariant"


# ---- Accelerate's FSDP2 ---------------------------------------------------------------------


@distributed_kit.check(2)
def accelerate_shards_after_the_optimizer_was_built(_: Path) -> None:
    """What ``Accelerator._prepare_fsdp2`` does, with its own ``fsdp2_switch_optimizer_parameters``.

    ``Accelerator(cpu=True).prepare`` with its FSDP2 plug-in left the parameters unsharded here.
    """
    from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters
    from torch.distributed.fsdp import fully_shard

    for kind in (AdamO, AngularAdamW):
        plain, model = network(), network()
        expected = kind(param_groups(plain, batch(0)), lr=1e-3)
        optimizer = kind(param_groups(model, batch(0)), lr=1e-3)
        optimizer.load_state_dict(optimizer.state_dict())  # so it moves the state to its device
        old = {name: p.data_ptr() for name, p in model.named_parameters()}
        for group in optimizer.param_groups:
            for i, p in enumerate(group["params"]):
                group["params"][i] = torch.empty(1, dtype=p.dtype, device=p.device)
                group["params"][i].data_ptr = p.data_ptr()
        fully_shard(model)
        new = dict(model.named_parameters())
        fsdp2_switch_optimizer_parameters(optimizer, {old[name]: new[name] for name in old})
        assert rules(optimizer) == rules(expected)
        train(model, range(5), optimizer)
        train(plain, range(5), expected)
        assert len(optimizer.state) == 5
        for p, q in zip(plain.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(q.full_tensor(), p, rtol=1e-4, atol=1e-6)


@pytest.fixture(scope="module")
def on_2_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return distributed_kit.outcomes(__name__, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.dist
def test_accelerate_shards_after_the_optimizer_was_built(on_2_ranks: dict[str, str]) -> None:
    pytest.importorskip("accelerate")
    assert on_2_ranks == {"accelerate_shards_after_the_optimizer_was_built": ""}
