"""Rank each batch among the embeddings of past batches, in two ways.

``memory`` of the losses is the paper's: the last batches are appended to the current one, whose images get the gradient
as queries and as references. ``RamboCrossBatchMemory`` is pytorch-metric-learning's queue of a number of embeddings,
constants all: only the queries get a gradient.

    python pml_examples/cross_batch_memory.py --steps 200
"""

import argparse

import torch
from torch.utils.data import DataLoader

from rambo_plugins.demo.data import load_split
from rambo_plugins.demo.train import conv_net
from rambo_plugins.evaluation import recall_at_k
from rambo_plugins.pml import RamboCrossBatchMemory, RamboRecallLoss
from rambo_plugins.pml.samplers import SuperLabelBatchSampler

LOSSES = {
    "no memory": lambda: RamboRecallLoss(lambda_val=4.0, margin=0.3),
    "memory of 3 batches": lambda: RamboRecallLoss(lambda_val=4.0, margin=0.3, memory=3, memory_warmup=20),
    "queue of 512": lambda: RamboCrossBatchMemory(RamboRecallLoss(lambda_val=4.0, margin=0.3), 64, memory_size=512),
}


def main(steps: int) -> None:
    train_set, test_set = load_split("glyphs")
    for name, make_loss in LOSSES.items():
        torch.manual_seed(0)
        sampler = SuperLabelBatchSampler(train_set.labels, train_set.super_labels, batches_per_pair=steps)
        net, loss_fn = conv_net(64), make_loss()
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
        net.train()
        for images, labels in DataLoader(train_set, batch_sampler=sampler):
            optimizer.zero_grad()
            loss_fn(net(images), labels).backward()
            optimizer.step()
        net.eval()
        with torch.no_grad():
            embeddings = torch.cat([net(images) for images in test_set.images.split(512)])
        result = recall_at_k(embeddings, test_set.labels, ks=(1,), normalize=True)
        print(f"{name}: R@1 {100 * result.recall[1]:.1f} %")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
