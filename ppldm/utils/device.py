"""What Paddle computes on. Paddle is imported when asked."""

from .errors import ConfigError


def use_device(name: str) -> None:
    """Compute on `name`: cpu, gpu, gpu:1, or another kind that this Paddle has. Raises ConfigError."""
    import paddle

    try:
        paddle.set_device(name)
    except (ValueError, RuntimeError) as error:
        found = ", ".join(["cpu", *paddle.device.get_available_device()])
        raise ConfigError(
            f"--device {name} cannot be used here; this Paddle finds {found}: choose one of these, or omit --device"
        ) from error
