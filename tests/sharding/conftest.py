"""The method is held to large models by small ones: what would be large there counts here whatever its bytes."""

from collections.abc import Iterator

import pytest

from redco_cli.sharding.decide import guards


@pytest.fixture(autouse=True, scope="module")
def nothing_is_small() -> Iterator[None]:
    """Parameters that stay whole are refused by their share alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guards, "SMALL", 0)
        yield
