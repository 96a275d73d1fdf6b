"""`--push_to_hub`: the trained model, with its card, in a repository of the Hugging Face hub. The token is in no record
of a run: `config/load.py` puts an expression in its place."""

from contextlib import contextmanager
from pathlib import Path

from ..config.training import TrainingOptions
from ..utils.errors import ConfigError, EnvironmentProblem
from ..utils.log import get_logger
from ..utils.variables import is_offline, read


def check_hub(arguments: TrainingOptions) -> None:
    """Raises ConfigError where there is no token, or no network. The hub is not asked."""
    from huggingface_hub import get_token

    if is_offline():
        raise ConfigError("--push_to_hub needs the network, which PPLDM_OFFLINE or HF_HUB_OFFLINE forbids; omit either")
    if not (arguments.hub_token or get_token()):
        fix = "log in (huggingface-cli login), or put a token that may write into HF_TOKEN"
        raise ConfigError(f"--push_to_hub needs a token of your account on the hub; {fix}")


class HubRepository:
    """The repository of a run, which is made, for its owner alone, where it is not there: a token that may not write is
    known before the first update. Raises EnvironmentProblem."""

    def __init__(self, arguments: TrainingOptions):
        from huggingface_hub import HfApi

        self.api = HfApi(endpoint=read("HF_ENDPOINT") or None, token=arguments.hub_token or None)
        self.name = arguments.hub_model_id or Path(arguments.output_dir).resolve().name
        with self._naming_errors("name another with --hub_model_id, or take a token that may write"):
            self.name = self.api.create_repo(self.name, private=True, exist_ok=True).repo_id

    def push(self, folder: Path, message: str) -> None:
        """Send the files of a folder, as one commit. Raises EnvironmentProblem."""
        with self._naming_errors(f"the model is whole in {folder}: hf upload {self.name} {folder}"):
            place = self.api.upload_folder(repo_id=self.name, folder_path=folder, commit_message=message)
        get_logger().info("on the hub: %s", place)

    @contextmanager
    def _naming_errors(self, fix: str):
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        from ..utils.machine.hub_names import network_errors

        try:
            yield
        except (HfHubHTTPError, HFValidationError, *network_errors(), OSError) as error:
            told = f"answers {error.response.status_code}" if isinstance(error, HfHubHTTPError) else "is not reached"
            told = "does not take such a name" if isinstance(error, HFValidationError) else told
            raise EnvironmentProblem(f"--push_to_hub {self.name}: the hub {told}; {fix}") from error
