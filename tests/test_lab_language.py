"""The language task: texts as numbers, windows, schedule, model, evaluation, and small runs."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from adamo_lab import data
from adamo_lab.errors import LabError
from adamo_lab.records import RunConfig
from adamo_lab.tasks import language
from adamo_lab.tasks.base import Phase
from adamo_lab.tasks.language import GPT, Language, made_text, windows
from adamo_lab.train import Stopped, new_model, train

CPU = torch.device("cpu")
SHARED = Path(__file__).parents[2] / "shared" / "data"
REAL = Path(os.environ.get("ADAMO_DATA") or SHARED)
SMALL = {"steps": 20, "batch": 16, "width": 32, "context": 32}
CORPORA = ["shakespeare", "wikitext2"]


def config(epochs: int = 3, seed: int = 0, optimizer: str = "adamw", **options: Any) -> RunConfig:
    hyper = {"lr": 2e-3}
    return RunConfig("language", optimizer, seed, epochs, hyper, {**SMALL, **options}, 1.0, True)


def task(**arguments: Any) -> Language:
    return Language(config(**arguments), CPU, None)


# --- texts


@pytest.mark.parametrize("corpus", CORPORA)
def test_numbers_stand_for_the_text(corpus: str) -> None:
    it = task(corpus=corpus)
    symbols, train_part, valid = it.corpus
    assert list(symbols) == sorted(set(symbols))
    text = [symbols[i] for i in torch.cat((train_part, valid))]
    assert text == made_text(list(symbols) if corpus == "shakespeare" else words())
    assert len(train_part) == 9 * len(valid)


def words() -> list[str]:
    return [f"w{i}" for i in range(200)]


def test_a_made_text_has_a_structure_to_learn() -> None:
    text = made_text(words())
    followers: dict[str, set[str]] = {}
    for i, (a, b) in enumerate(pairwise(text)):
        if (i + 1) % 16:
            followers.setdefault(a, set()).add(b)
    assert set(text) == set(words())
    assert max(map(len, followers.values())) <= 4


def write_wikitext(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"train": " a b <unk> \n" * 30, "valid": " b a \n" * 20}
    monkeypatch.setattr(data, "TOKENS", {"train": 120, "valid": 60})
    monkeypatch.setattr(data, "VOCABULARY", 4)
    for split, text in texts.items():
        (where / f"wikitext-2.{split}.txt").write_text(text)


def from_files(where: Path, **options: Any) -> Language:
    options = {**SMALL, "corpus": "wikitext2", "context": 8, **options}
    return Language(RunConfig("language", "adamw", 0, 2, {"lr": 1e-3}, options), CPU, where)


def test_words_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wikitext(tmp_path, monkeypatch)
    corpus = from_files(tmp_path).corpus
    assert corpus.vocabulary == ("<eos>", "<unk>", "a", "b")
    assert corpus.train[:5].tolist() == [2, 3, 1, 0, 2]
    assert corpus.valid[:4].tolist() == [3, 2, 0, 3]
    assert from_files(tmp_path).corpus.train is corpus.train  # shared by all runs


def test_another_vocabulary_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wikitext(tmp_path, monkeypatch)
    monkeypatch.setattr(data, "VOCABULARY", 5)
    with pytest.raises(LabError, match="has 4 different tokens, WikiText-2 has 5"):
        from_files(tmp_path)


def test_an_unknown_validation_word_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wikitext(tmp_path, monkeypatch)
    (tmp_path / "wikitext-2.valid.txt").write_text(" b c \n" * 20)
    with pytest.raises(LabError, match="'c' of the validation text is not in the training text"):
        from_files(tmp_path)


@pytest.mark.parametrize(
    ("corpus", "title"), [("shakespeare", "Tiny Shakespeare"), ("wikitext2", "WikiText-2")]
)
def test_missing_texts_are_named(tmp_path: Path, corpus: str, title: str) -> None:
    with pytest.raises(LabError, match=f"{title} is not in {tmp_path}"):
        from_files(tmp_path, corpus=corpus)


REFUSED = {
    "corpus": ({"corpus": "bible"}, "corpus must be shakespeare or wikitext2, got 'bible'"),
    "precision": ({"precision": "half"}, "precision must be bfloat16 or float32, got 'half'"),
    "heads": ({"heads": 5}, "width must be a multiple of heads, got 32 and 5"),
    "context": ({"context": 4000}, "context 4000 is longer than the text"),
}


@pytest.mark.parametrize(("options", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(LabError, match=message):
        task(**options)


# --- windows


def test_batches() -> None:
    it = task()
    ((found,),) = it.batches(0)
    assert (found.shape, found.dtype) == ((20, 16, 33), torch.int64)
    text = it.train.tolist()
    known = {tuple(text[i : i + 33]) for i in range(len(text) - 32)}
    assert all(tuple(window) in known for window in found.flatten(0, 1).tolist())


def test_windows_reach_both_ends_of_the_text() -> None:
    it = task()
    it.train = torch.arange(40)  # eight places to start at
    ((found,),) = it.batches(0)
    assert found[..., 0].unique().tolist() == list(range(8))
    assert found.max() == 39


def test_batches_follow_from_seed_and_epoch() -> None:
    first, other = task(seed=1), task(seed=2)
    ((tokens,),) = first.batches(3)
    assert torch.equal(tokens, task(seed=1).batches(3)[0][0])
    assert not torch.equal(tokens, first.batches(4)[0][0])
    assert not torch.equal(tokens, other.batches(3)[0][0])


def test_validation_windows_lie_side_by_side() -> None:
    found = windows(torch.arange(12), 4)
    assert found.tolist() == [[0, 1, 2, 3, 4], [4, 5, 6, 7, 8]]
    assert windows(torch.arange(13), 4).shape == (3, 5)


# --- model


def gpt(**sizes: Any) -> GPT:
    torch.manual_seed(0)
    return GPT(50, **{"layers": 2, "heads": 4, "width": 32, "context": 16, **sizes})


@torch.no_grad()
def test_the_model_does_not_look_ahead() -> None:
    model = gpt()
    tokens = torch.randint(50, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = (changed[:, 10:] + 1) % 50
    assert torch.equal(model(tokens)[:, :10], model(changed)[:, :10])
    assert not torch.equal(model(tokens)[:, 10:], model(changed)[:, 10:])
    torch.testing.assert_close(model(tokens[:, :7]), model(tokens)[:, :7])


def test_size_and_initial_weights() -> None:
    model = gpt(layers=8, width=64)
    layer = 12 * 64 * 64 + 13 * 64
    assert sum(p.numel() for p in model.parameters()) == 8 * layer + (50 + 16 + 50) * 64 + 2 * 64
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            residual = name.endswith(("out.weight", "down.weight"))
            expected = 0.02 / math.sqrt(16) if residual else 0.02
            assert weight.std().item() == pytest.approx(expected, rel=0.1), name
        elif name.endswith("bias"):
            assert not weight.any()


@pytest.mark.parametrize("corpus", CORPORA)
def test_words_share_the_embedding_with_the_head(corpus: str) -> None:
    model = task(corpus=corpus).model()
    assert isinstance(model, GPT)
    assert (model.head.weight is model.token.weight) == (corpus == "wikitext2")


def test_dropout_acts_in_training_only() -> None:
    model = gpt(dropout=0.5)
    tokens = torch.randint(50, (2, 16))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_precision(precision: str) -> None:
    it = task(precision=precision)
    model = new_model(it)
    seen: list[torch.dtype] = []
    model.get_submodule("head").register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    ((found,),) = it.batches(0)
    loss = it.loss(model, (found[0],), Phase())
    loss.backward()
    assert seen == [getattr(torch, precision)]
    assert loss.dtype == torch.float32
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in model.parameters())


# --- schedule


def test_warmup_and_cosine() -> None:
    it = task(epochs=50)
    factors = [it.phase(epoch).lr_factor for epoch in range(50)]
    assert factors[:2] == pytest.approx([0.25, 0.75])  # 4 % are two rounds
    assert factors[2:] == sorted(factors[2:], reverse=True)
    middle = (factors[25] + factors[26]) / 2
    assert middle == pytest.approx(0.55, abs=1e-3)
    assert factors[2] == pytest.approx(1.0, abs=1e-3)
    assert factors[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(it.phase(epoch) == Phase(factor) for epoch, factor in enumerate(factors))


@pytest.mark.parametrize("epochs", [1, 2, 7])
def test_short_runs_have_a_schedule(epochs: int) -> None:
    it = task(epochs=epochs)
    assert all(0.1 < it.phase(epoch).lr_factor <= 1 for epoch in range(epochs))


# --- evaluation


@torch.no_grad()
@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("most", [2048, 48], ids=["all windows", "the first 48"])
def test_evaluation_equals_a_naive_one(
    monkeypatch: pytest.MonkeyPatch, corpus: str, most: int
) -> None:
    monkeypatch.setattr(language, "EVALUATED", most)
    it = task(corpus=corpus)
    model = new_model(it).eval()
    metrics = it.evaluate(model)
    text = it.corpus.valid
    count = min((len(text) - 1) // 32, most)
    losses = []
    for i in range(count):
        logits = model(text[None, 32 * i : 32 * i + 32])[0]
        losses.append(F.cross_entropy(logits, text[32 * i + 1 : 32 * i + 33]))
    loss = torch.stack(losses).mean()
    torch.testing.assert_close(metrics["valid_loss"], loss)
    torch.testing.assert_close(metrics["valid_perplexity"], loss.exp())
    assert ("valid_bits" in metrics) == (corpus == "shakespeare")
    if corpus == "shakespeare":
        torch.testing.assert_close(metrics["valid_bits"], loss / math.log(2))
    assert all(value.dim() == 0 for value in metrics.values())


@torch.no_grad()
def test_evaluation_does_not_depend_on_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language, "EVALUATED", 48)
    small, large = (task(batch=batch) for batch in (2, 64))
    model = new_model(small).eval()
    assert small.evaluate(model)["valid_loss"] == large.evaluate(model)["valid_loss"]


def test_the_best_loss_passes_over_what_diverged() -> None:
    rows = [{"valid_loss": 2.0}, {"valid_loss": 1.5}, {"valid_loss": None}]
    assert task().result(rows) == {"best_valid_loss": 1.5}
    assert task().result(rows[2:]) == {"best_valid_loss": None}


# --- whole runs


@pytest.mark.parametrize("corpus", CORPORA)
def test_a_run_on_made_text_learns(tmp_path: Path, corpus: str) -> None:
    record = train(config(corpus=corpus), tmp_path)
    losses = [row["valid_loss"] for row in record.metrics]
    assert losses == sorted(losses, reverse=True)
    symbols = {"shakespeare": 26, "wikitext2": 200}[corpus]
    assert losses[-1] < 0.9 * math.log(symbols)
    assert record.result["best_valid_loss"] == losses[-1]


class StopAfter:
    """Asks to stop once, after some epochs."""

    def __init__(self, epochs: int) -> None:
        self.left = epochs

    def progress(self, *_: object) -> None:
        self.left -= 1

    def __call__(self) -> bool:
        return self.left <= 0


@pytest.mark.parametrize("corpus", CORPORA)
@pytest.mark.parametrize("optimizer", ["adamw", "adamo"])
def test_a_stopped_run_ends_the_same(tmp_path: Path, optimizer: str, corpus: str) -> None:
    run = config(optimizer=optimizer, corpus=corpus, dropout=0.1)
    whole = train(run, tmp_path / "whole")
    stop = StopAfter(1)
    with pytest.raises(Stopped):
        train(run, tmp_path / "halves", progress=stop.progress, stop=stop)
    halves = train(run, tmp_path / "halves")
    assert halves.metrics == whole.metrics
    assert halves.result == whole.result


@pytest.mark.parametrize(("corpus", "vocabulary"), [("shakespeare", 65), ("wikitext2", 33_278)])
def test_the_real_texts(corpus: str, vocabulary: int) -> None:
    options = {**SMALL, "corpus": corpus}
    try:
        it = Language(RunConfig("language", "adamw", 0, 2, {"lr": 1e-3}, options), CPU, REAL)
    except LabError as error:
        if " is not in " in str(error):
            pytest.skip(f"no real data: {error}")
        raise
    assert len(it.corpus.vocabulary) == vocabulary
    model = new_model(it)
    ((found,),) = it.batches(0)
    loss = it.loss(model, (found[0],), Phase())
    assert loss.item() == pytest.approx(math.log(vocabulary), rel=0.05)
