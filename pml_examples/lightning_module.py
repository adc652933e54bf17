"""RaMBO in a LightningModule, tested by RecallMetric. Needs ``pip install lightning``.

python pml_examples/lightning_module.py --steps 200
"""

import argparse

import torch
from torch.utils.data import DataLoader

from rambo_plugins.core.distributed import gather_rows
from rambo_plugins.demo.data import load_split
from rambo_plugins.demo.train import conv_net
from rambo_plugins.evaluation.distributed import RecallMetric
from rambo_plugins.pml import RamboRecallLoss
from rambo_plugins.pml.samplers import SuperLabelBatchSampler

try:
    import lightning
except ModuleNotFoundError:
    raise SystemExit("this example needs Lightning: pip install lightning") from None


class Retrieval(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = conv_net(64)
        self.loss_fn = RamboRecallLoss(lambda_val=4.0, margin=0.3)  # a module: its memory is in Lightning's checkpoints
        self.metric = RecallMetric(ks=(1, 2, 4, 8), normalize=True)

    def training_step(self, batch: list, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        loss = self.loss_fn(*gather_rows(self.net(images), labels))  # on one process gather_rows changes nothing
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list, batch_idx: int) -> None:
        images, labels, ids = batch
        self.metric.update(self.net(images), labels, ids)

    def on_validation_epoch_end(self) -> None:
        recall = self.metric.compute().recall
        self.log_dict({f"recall_at_{k}": value for k, value in recall.items()})
        self.metric.reset()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=2e-3)


def main(steps: int) -> None:
    lightning.seed_everything(0)
    train_set, test_set = load_split("glyphs")
    sampler = SuperLabelBatchSampler(train_set.labels, train_set.super_labels, batches_per_pair=steps)
    with_ids = torch.utils.data.TensorDataset(test_set.images, test_set.labels, torch.arange(len(test_set)))
    # The sampler gives each process its part by itself. Lightning's test of two batches would be of few classes.
    trainer = lightning.Trainer(max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0)
    trainer.fit(Retrieval(), DataLoader(train_set, batch_sampler=sampler), DataLoader(with_ids, batch_size=512))
    print({name: round(value.item(), 3) for name, value in trainer.callback_metrics.items()})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
