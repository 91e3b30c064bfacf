"""Where what others wrote lies, to compare with: `make test-all` fetches it beside the environment."""

import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

_BELOW = [Path(os.environ.get("TRL_FOLDER", sys.prefix)) / below for below in ("", "trl", "oracles/trl")]
TRL = next((folder for folder in _BELOW if (folder / "chat_templates").is_dir()), None)
"""TRL's package (1.16), unpacked and not installed; None where it is not."""


def find_bitsandbytes() -> ModuleType | None:
    """bitsandbytes (0.50.2), installed or unpacked beside the environment; None where it is not."""
    folder = str(Path(sys.prefix) / "oracles")
    sys.path.append(folder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import bitsandbytes
            import bitsandbytes.functional
    except ImportError:
        return None
    finally:
        sys.path.remove(folder)
    return bitsandbytes
