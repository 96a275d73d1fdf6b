"""No more is built than a file of weights can fill: a few numbers in a config beside it can ask for any amount."""

from contextlib import contextmanager
from math import prod

from ...utils.errors import ModelError
from ..components import ComponentWeights

# A network somewhat larger than its file is built all the same: what is missing is then listed by name.
_SPARE_VALUES, _SPARE_PARAMETERS = 1 << 24, 1000


class _TooLarge(Exception):
    """A network wants more than the file of its weights has."""


@contextmanager
def within_file(component: ComponentWeights):
    """While a network of `component.config` is built here: ModelError as soon as its parameters are far more than
    those of `component`, in number or in size, before memory is taken for them; and where there is no memory for
    them."""
    from paddle.base.layer_helper_base import LayerHelperBase

    create = LayerHelperBase.create_parameter
    most = 2 * sum(array.size for array in component.arrays.values()) + _SPARE_VALUES
    count_most = 2 * len(component.arrays) + _SPARE_PARAMETERS
    made = {"count": 0, "values": 0}

    def counted(self, attr, shape, *args, **settings):
        made["count"] += 1
        made["values"] += prod(int(side) for side in shape)
        if made["count"] > count_most or made["values"] > most:
            raise _TooLarge
        return create(self, attr, shape, *args, **settings)

    LayerHelperBase.create_parameter = counted
    try:
        yield
    except _TooLarge as error:
        raise ModelError(
            f"{component.source}: the config describes a far larger network than the weights beside it; copy both again"
        ) from error
    except MemoryError as error:
        raise ModelError(f"{component.source} needs more memory than there is; use a machine with more") from error
    finally:
        LayerHelperBase.create_parameter = create


def require_few_layers(config: dict, num_arrays: int, source) -> None:
    """Raises ModelError where a config has more layers than its weights have arrays: their names would not end."""
    per_block = config.get("layers_per_block") or 0
    for layers in (config.get("encoder_layers", 0), per_block):
        if isinstance(layers, (int, float)) and layers > num_arrays:
            raise ModelError(f"{source}: the config has {layers} layers, and the weights {num_arrays} arrays")
