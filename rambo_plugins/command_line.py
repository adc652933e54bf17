"""The parser of the commands: what is wrong with a command line is one line."""

from __future__ import annotations

import argparse
import sys
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
    """``argparse``'s, but an error is a line without the usage, and options are not abbreviated."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: error: {message}; --help lists the options", file=sys.stderr)
        sys.exit(2)
