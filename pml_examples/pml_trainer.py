"""RaMBO in pytorch-metric-learning's trainer and tester: MetricLossOnly, with our sampler and Recall@K.

python pml_examples/pml_trainer.py --steps 200
"""

import argparse
import logging

import torch
from pytorch_metric_learning import testers, trainers

from rambo_plugins.demo.data import load_split
from rambo_plugins.demo.train import conv_net
from rambo_plugins.evaluation import RecallCalculator
from rambo_plugins.pml import RamboAPLoss
from rambo_plugins.pml.samplers import SuperLabelBatchSampler


def main(steps: int) -> None:
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    train_set, test_set = load_split("glyphs")
    net = conv_net(64)
    tester = testers.GlobalEmbeddingSpaceTester(
        batch_size=512, dataloader_num_workers=0, accuracy_calculator=RecallCalculator(ks=(1, 2, 4, 8))
    )

    def test(trainer: trainers.MetricLossOnly) -> None:
        tester.test({"test": test_set}, trainer.epoch, trainer.models["trunk"], trainer.models["embedder"])

    trainer = trainers.MetricLossOnly(
        models={"trunk": net, "embedder": torch.nn.Identity()},
        optimizers={"trunk_optimizer": torch.optim.Adam(net.parameters(), lr=2e-3)},
        batch_size=None,  # the sampler is a batch sampler, which has its own
        loss_funcs={"metric_loss": RamboAPLoss(lambda_val=16.0, margin=0.3)},
        dataset=train_set,
        sampler=SuperLabelBatchSampler(train_set.labels, train_set.super_labels, batches_per_pair=steps),
        dataloader_num_workers=0,
        end_of_epoch_hook=test,
    )
    trainer.train(num_epochs=1)
    print({name: round(float(value), 3) for name, value in tester.all_accuracies["test"].items() if "_at_" in name})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
