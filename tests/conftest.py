"""A hostile environment for every test: eight fake devices, no hub, no user cache, no stray recipe overrides."""

import os
import tempfile

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HOME"] = tempfile.mkdtemp(prefix="redco-test-hf-")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "agg"
for variable in [name for name in os.environ if name.startswith("REDCO_")]:
    del os.environ[variable]
