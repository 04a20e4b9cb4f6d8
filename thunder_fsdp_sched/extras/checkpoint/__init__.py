"""State dicts and checkpoints: whole, sharded, on disk."""

from ..state_dicts.row_piece import RowPiece
from .api import load_checkpoint, save_checkpoint, save_checkpoint_async
from .beside import Saving
from .on_all_ranks import CheckpointError
from .retention import latest_checkpoint
from .state_dict import full_state_dict, get_model_state_dict, get_optimizer_state_dict
from .whole_files import load_safetensors, save_safetensors, save_safetensors_async

__all__ = [
    "CheckpointError",
    "RowPiece",
    "Saving",
    "full_state_dict",
    "get_model_state_dict",
    "get_optimizer_state_dict",
    "latest_checkpoint",
    "load_checkpoint",
    "load_safetensors",
    "save_checkpoint",
    "save_checkpoint_async",
    "save_safetensors",
    "save_safetensors_async",
]
