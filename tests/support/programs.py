"""Where programs are that tests run."""

import os
import shutil
import sys
from pathlib import Path


def find(name: str) -> str | None:
    """Return the path of a program: pinned ones beside the interpreter, where ``make test`` puts them, come first."""
    return shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
