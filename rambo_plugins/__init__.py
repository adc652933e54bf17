"""RaMBO, differentiable rank metrics (Rolínek et al., CVPR 2020), for the toolkits that people train with.

``rambo_plugins.core`` holds the ranking and the losses; ``rambo_plugins.pml`` brings them to pytorch-metric-learning;
``rambo_plugins.evaluation`` measures Recall@K with faiss; ``python -m rambo_plugins.demo`` shows all of it at work.
"""

__version__ = "0.1.0"
