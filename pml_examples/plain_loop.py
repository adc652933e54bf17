"""RaMBO in a plain training loop: a network, a loss, batches by super class, Recall@K on letters never seen.

python pml_examples/plain_loop.py --steps 200
"""

import argparse

import torch
from torch.utils.data import DataLoader

from rambo_plugins.demo.data import load_split
from rambo_plugins.demo.train import conv_net
from rambo_plugins.evaluation import recall_at_k
from rambo_plugins.pml import RamboRecallLoss
from rambo_plugins.pml.samplers import SuperLabelBatchSampler


def main(steps: int) -> None:
    torch.manual_seed(0)
    train_set, test_set = load_split("glyphs")
    sampler = SuperLabelBatchSampler(train_set.labels, train_set.super_labels, batch_size=128, batches_per_pair=steps)
    net = conv_net(64)
    loss_fn = RamboRecallLoss(lambda_val=4.0, margin=0.3)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    net.train()
    for images, labels in DataLoader(train_set, batch_sampler=sampler):
        loss = loss_fn(net(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"loss of the last batch: {loss.item():.3f}")

    net.eval()
    with torch.no_grad():
        embeddings = torch.cat([net(images) for images in test_set.images.split(512)])
    print(recall_at_k(embeddings, test_set.labels, ks=(1, 2, 4, 8), normalize=True))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    main(parser.parse_args().steps)
