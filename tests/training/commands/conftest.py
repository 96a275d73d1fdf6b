"""What the tests of commands share."""

import json
from functools import cache

import pytest

from ppldm.training.commands import dry_run
from ppldm.weights.fill import parameter_shapes


@pytest.fixture(scope="module")
def shapes_of_each_config_once():
    """Shapes of networks are counted once for each config, and not for each recipe."""

    @cache
    def of(kind: str, config: str, source: str):
        return parameter_shapes(kind, json.loads(config), source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dry_run, "parameter_shapes", lambda kind, config, source: of(kind, json.dumps(config), source))
        yield
