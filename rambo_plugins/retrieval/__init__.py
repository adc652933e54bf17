"""Training and testing of retrieval networks by one command, ``python -m rambo_plugins.retrieval``.

``arguments.py`` is the command line with the recipes of the data sets, ``data.py`` what is trained and tested on,
``refusals.py`` which options fit together, ``models.py`` backbones and the embedding layer, ``losses.py`` losses and
miners by name, ``train.py`` the loop, ``watch.py`` whether it trains, ``identity.py`` what a run must have to go on,
``checkpoint.py``, ``records.py`` and ``fresh.py`` its files, ``evaluate.py`` Recall@K and the files of embeddings,
``processes.py`` and ``errors.py`` how several processes, and errors, end.

The loop is a plain one and not a trainer of pytorch-metric-learning, whose losses and miners it uses. Those trainers
know no position within an epoch to resume from, no gradient scaling, and no loss over the batches of all processes.
Where none of this is needed they work with the losses, samplers and metrics here: ``pml_examples/pml_trainer.py``.
"""

try:
    import faiss  # noqa: F401
    import matplotlib  # noqa: F401
    import PIL  # noqa: F401
    import pytorch_metric_learning  # noqa: F401
    import sklearn  # noqa: F401
    import torchvision  # noqa: F401
    import tqdm  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f'rambo_plugins.retrieval needs {error.name}: pip install "rambo-plugins[retrieval]"', name=error.name
    ) from error
