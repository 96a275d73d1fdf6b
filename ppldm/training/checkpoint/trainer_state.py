"""trainer_state.json: how far a run is, in the form that PaddleNLP's Trainer reads and writes."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class TrainerState:
    """The fields of PaddleNLP's TrainerState, of which the hand-written loop knows the step and the last one."""

    epoch: float | None = None
    global_step: int = 0
    consumed_samples: int = 0
    max_steps: int = 0
    num_train_epochs: int = 0
    total_flos: float = 0
    log_history: list = field(default_factory=list)
    best_metric: float | None = None
    best_model_checkpoint: str | None = None
    is_local_process_zero: bool = True
    is_world_process_zero: bool = True
    trial_name: str | None = None
    trial_params: dict | None = None

    def save_to_json(self, path: str) -> None:
        """Write the file as PaddleNLP does, to the byte."""
        text = json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"
        Path(path).write_text(text, encoding="utf-8")
