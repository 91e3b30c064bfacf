"""A hostile environment for every test: eight fake devices, no hub, no user cache, no stray recipe overrides.

Each worker of pytest-xdist reads this file by itself, so each has a directory of its own, which ends with it. There it
keeps every program it compiles: the tests compile the same small ones thousands of times, and what is kept is machine
code, so that no number changes. The processes that tests start read it too. Most programs run once or twice, so that
LLVM's optimizations cost more than they save, and so do MLIR's emitters of fused loops and modules cut for several
threads; XLA's own optimizations, which decide what is fused, moved and kept, stay as they are.
"""

import gc
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator

import pytest

OWN = tempfile.mkdtemp(prefix="redco-test-")
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_force_host_platform_device_count=8",
        "--xla_backend_optimization_level=0",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)
os.environ["PJRT_NPROC"] = "32"  # as `redco_cli.runtime.platforms.spare_threads` has it for eight devices
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
os.environ["HF_HOME"] = f"{OWN}/huggingface"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["MPLBACKEND"] = "agg"
for variable in [name for name in os.environ if name.startswith(("REDCO_", "JAX_COMPILATION", "JAX_PERSISTENT"))]:
    del os.environ[variable]
os.environ["REDCO_CACHE"] = OWN

import jax  # noqa: E402 - it reads its part of the environment once
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

from redco_cli.runtime.cache import enable_compilation_cache  # noqa: E402

enable_compilation_cache()
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.fixture(scope="module", autouse=True)
def what_stays_is_searched_once() -> Iterator[None]:
    """Garbage is collected between modules, and what JAX keeps until the end is not searched for it again.

    A worker comes to hold millions of objects: at its end each collection took two seconds.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture
def failing_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For a test whose disk fails: what is cut off in the middle troubles no test that comes after.

    Programs are kept elsewhere meanwhile, and the coroutines of saves that were given up are collected here: they
    complain that nobody awaited them in whichever test they are collected.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REDCO_CACHE", str(tmp_path_factory.mktemp("cache")))
        enable_compilation_cache()
        compilation_cache.reset_cache()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "coroutine 'async_serialize", RuntimeWarning)
            yield
            gc.collect()
    enable_compilation_cache()
    compilation_cache.reset_cache()


def pytest_unconfigure() -> None:
    shutil.rmtree(OWN, ignore_errors=True)
