"""The demo: RaMBO against losses of pytorch-metric-learning on real images, ``python -m rambo_plugins.demo``.

``glyphs.py`` renders the images, ``data.py`` splits the data sets, ``train.py`` is one training run, ``identity.py``
says which runs have the same figures, ``report.py`` draws what came out, ``__main__.py`` is the command line.
"""

try:
    import faiss  # noqa: F401
    import matplotlib  # noqa: F401
    import PIL  # noqa: F401
    import pytorch_metric_learning  # noqa: F401
    import sklearn  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        f'rambo_plugins.demo needs {error.name}: pip install "rambo-plugins[demo]"', name=error.name
    ) from error
