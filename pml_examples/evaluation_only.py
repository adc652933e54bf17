"""Recall@K and MAP@R of embeddings that are there already, from any model: two npy files.

    python pml_examples/evaluation_only.py embeddings.npy labels.npy

From the command line alone, with plots, panels and galleries larger than memory: ``rambo-recall --help``.
"""

import argparse

import numpy as np

from rambo_plugins.evaluation import recall_at_k


def main(embeddings: str, labels: str) -> None:
    result = recall_at_k(
        np.load(embeddings, mmap_mode="r"),  # (N, D); read in blocks
        np.load(labels),  # (N,)
        ks=(1, 10, 100),
        normalize=True,
        map_at_r=True,
    )
    print(result)
    for k, (low, high) in result.interval.items():
        print(f"R@{k}: {100 * result.recall[k]:.2f} %, 95 % interval {100 * low:.2f} to {100 * high:.2f}")
    print(f"the first queries find their first relevant item at rank {result.first_rank[:5].tolist()} (0: beyond 100)")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("embeddings")
    parser.add_argument("labels")
    arguments = parser.parse_args()
    main(arguments.embeddings, arguments.labels)
