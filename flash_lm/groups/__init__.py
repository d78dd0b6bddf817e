"""The keys that all rows share, in four groups; sections are declared beside the parts that read them."""

from flash_lm.groups.data import DataConfig
from flash_lm.groups.mesh import MESH_AXES, MeshConfig
from flash_lm.groups.model import DTYPES, ModelConfig
from flash_lm.groups.train import TrainConfig

__all__ = ["DTYPES", "MESH_AXES", "DataConfig", "MeshConfig", "ModelConfig", "TrainConfig"]
