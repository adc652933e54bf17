"""Train and test a retrieval network: the same as ``python -m rambo_plugins.retrieval``.

python pml_examples/train.py --data glyphs
python pml_examples/train.py --data sop --root FOLDER --preset paper --out runs/sop
torchrun --nproc-per-node 4 pml_examples/train.py --data inshop --root FOLDER --preset paper --out runs/inshop
"""

import sys

from rambo_plugins.retrieval.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
