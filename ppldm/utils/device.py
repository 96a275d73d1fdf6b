"""What Paddle computes on. Paddle is imported when asked."""

from .errors import ConfigError


def use_device(name: str) -> None:
    """Compute on `name`: cpu, gpu, gpu:1, or another kind that this Paddle has. Raises ConfigError."""
    import paddle

    try:
        paddle.set_device(name)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(
            f"--device {name} cannot be used here: {str(error).splitlines()[0]}; leave it away, or choose cpu"
        ) from error
