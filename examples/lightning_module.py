"""Lightning: automatic or manual optimization, mixed precision, clipping, resuming.

    python examples/lightning_module.py [--epochs 4] [--manual] [--precision bf16-mixed]

Leave `fused=True` out: the fused form is the default, and Lightning refuses to clip gradients
under mixed precision for an optimizer that was told so.
"""

from __future__ import annotations

import argparse
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from adamo_optim import AngularAdamW, param_groups
from adamo_optim.callbacks import lightning_callback


class Classifier(L.LightningModule):
    def __init__(self, example_batch: Tensor, epochs: int, manual: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        self.example_batch, self.epochs = example_batch, epochs
        hidden = [nn.Linear(20, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU()]
        self.net = nn.Sequential(*hidden, nn.Linear(64, 4))

    def configure_optimizers(self) -> Any:
        # self.net, not self: a copy of a LightningModule copies its Trainer as well
        groups = param_groups(self.net, self.example_batch)
        optimizer = AngularAdamW(groups, lr=1e-3, weight_decay=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.epochs)]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
            optimizer.step()
        return loss

    def on_train_epoch_end(self) -> None:
        print(f"epoch {self.current_epoch + 1}: loss {self.trainer.callback_metrics['loss']:.4f}")
        if not self.automatic_optimization:
            self.lr_schedulers().step()  # type: ignore[union-attr]


def make_loader(count: int = 512) -> DataLoader[Any]:
    """Points around four centres."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (count,), generator=generator)
    centres = torch.randn(4, 20, generator=generator)
    noise = torch.randn(count, 20, generator=generator)
    return DataLoader(TensorDataset(centres[labels] + noise, labels), batch_size=32)


def train(
    epochs: int, out: str, manual: bool, precision: Any, stop: int = 0, resume: str | None = None
) -> L.Trainer:
    L.seed_everything(0, verbose=False)
    loader = make_loader()
    trainer = L.Trainer(
        max_epochs=stop or epochs,
        precision=precision,
        gradient_clip_val=None if manual else 1.0,
        callbacks=[lightning_callback(every=16)],
        logger=TensorBoardLogger(out),
        log_every_n_steps=16,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(next(iter(loader))[0], epochs, manual), loader, ckpt_path=resume)
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description="AngularAdamW with Lightning.")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--manual", action="store_true", help="manual optimization")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--out", default="lab-output/lightning", help="checkpoints, event files")
    flags = parser.parse_args()
    warnings.filterwarnings("ignore", ".*does not have many workers.*")
    settings = (flags.epochs, flags.out, flags.manual, flags.precision)
    half = train(*settings, stop=flags.epochs // 2)
    print("resumed:")
    train(*settings, resume=half.checkpoint_callback.best_model_path)  # type: ignore[union-attr]


if __name__ == "__main__":
    main()
