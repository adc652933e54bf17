"""Fine-tune a ResNet-18 on your own images, a folder for each class, and name the nearest images of the first one.

The first half of the classes is for training, the test is on the others. ``--weights`` takes "DEFAULT" (torchvision's,
pretrained on ImageNet, downloaded once), a file with a state dict, or "none".

    python pml_examples/fine_tuning.py FOLDER --steps 200 --weights DEFAULT
"""

import argparse

import torch
from torch.utils.data import DataLoader

from rambo_plugins.evaluation import recall_at_k
from rambo_plugins.pml import RamboRecallLoss
from rambo_plugins.pml.datasets import check_images, read_folders, test_transform, train_transform
from rambo_plugins.pml.samplers import SuperLabelBatchSampler
from rambo_plugins.retrieval.models import build_net


def main(folder: str, steps: int, weights: str, size: int, batch_size: int) -> None:
    torch.manual_seed(0)
    train_set, test_set = read_folders(folder)
    for images in (train_set, test_set):
        check_images(images, workers=2)  # a damaged file ends the script here, and not after an hour
    train_set.transform = train_transform(size, resize=size * 8 // 7)
    test_set.transform = test_transform(size, resize=size * 8 // 7)
    sampler = SuperLabelBatchSampler(train_set.labels, batch_size=batch_size, images_per_class=4)
    net = build_net("resnet18", embedding_size=128, weights=weights, freeze_bn=weights != "none")
    optimizer = torch.optim.Adam(
        [{"params": net.trunk.parameters(), "lr": 1e-5}, {"params": net.embedding.parameters(), "lr": 1e-4}]
    )
    loss_fn = RamboRecallLoss(lambda_val=4.0, margin=0.02)

    net.train()
    step = 0
    while step < steps:
        train_set.set_epoch(step // len(sampler))  # other crops in every epoch; the sampler counts by itself
        for images, labels in DataLoader(train_set, batch_sampler=sampler, num_workers=2):
            optimizer.zero_grad()
            loss_fn(net(images), labels).backward()
            optimizer.step()
            step += 1
            if step == steps:
                break

    net.eval()
    with torch.no_grad():
        embeddings = torch.cat([net(images) for images, _ in DataLoader(test_set, batch_size=64, num_workers=2)])
    embeddings = torch.nn.functional.normalize(embeddings)
    print(recall_at_k(embeddings, test_set.labels, ks=(1, 2, 4, 8)))
    others = (embeddings[1:] @ embeddings[0]).argsort(descending=True)[:3] + 1  # without the image itself
    print(f"nearest to {test_set.paths[0]}: {', '.join(test_set.paths[i] for i in others)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--weights", default="DEFAULT")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch-size", type=int, default=64)
    main(**vars(parser.parse_args()))
