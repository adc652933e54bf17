"""RaMBO on several processes: each embeds its part of the batch, the loss is that of the whole batch.

torchrun --nproc-per-node 2 pml_examples/ddp.py --steps 100
"""

import argparse
import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from rambo_plugins.core.distributed import gather_rows
from rambo_plugins.demo.data import load_split
from rambo_plugins.demo.train import conv_net
from rambo_plugins.evaluation.distributed import RecallMetric
from rambo_plugins.pml import RamboRecallLoss
from rambo_plugins.pml.samplers import SuperLabelBatchSampler


def main(steps: int) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    train_set, test_set = load_split("glyphs")
    # batch_size is that of all processes together; each gets its part.
    sampler = SuperLabelBatchSampler(train_set.labels, train_set.super_labels, batch_size=128, batches_per_pair=steps)
    net = torch.nn.SyncBatchNorm.convert_sync_batchnorm(conv_net(64)) if device.type == "cuda" else conv_net(64)
    net = DistributedDataParallel(net.to(device))
    loss_fn = RamboRecallLoss(lambda_val=4.0, margin=0.3)
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)

    net.train()
    for images, labels in DataLoader(train_set, batch_sampler=sampler):
        embeddings, all_labels = gather_rows(net(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss_fn(embeddings, all_labels).backward()
        optimizer.step()

    net.eval()
    metric = RecallMetric(ks=(1, 2, 4, 8), normalize=True, group=dist.new_group(backend="gloo"))
    own = range(dist.get_rank(), len(test_set), dist.get_world_size())
    for start in range(0, len(own), 512):
        ids = torch.tensor(own[start : start + 512])
        with torch.no_grad():
            metric.update(net.module(test_set.images[ids].to(device)), test_set.labels[ids], ids)
    result = metric.compute()
    if dist.get_rank() == 0:
        print(result)
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    main(parser.parse_args().steps)
