"""Where what others wrote lies, to compare with: `make test-all` fetches it beside the environment."""

import os
import sys
from pathlib import Path

_BELOW = [Path(os.environ.get("TRL_FOLDER", sys.prefix)) / below for below in ("", "trl", "oracles/trl")]
TRL = next((folder for folder in _BELOW if (folder / "chat_templates").is_dir()), None)
"""TRL's package (1.16), unpacked and not installed; None where it is not."""
