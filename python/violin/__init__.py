"""Violin: a learned spatial prior for vision transformers, made from space-filling curves.

>>> import torch, violin
>>> mask = violin.ViolinMask(heads=3, grid=(4, 4), init="spread")
>>> mask.tables((4, 4), prefix=1).gain.shape      # class token and 16 patches
torch.Size([3, 17, 17])

``violin.plug(model)`` puts such a mask into every attention layer of a vision transformer, ``violin.unplug(model)`` takes
it out again.
"""

from typing import TYPE_CHECKING, Any

from . import _library, curves, ops
from .config import MaskConfig
from .errors import Error
from .layers import Attention, MultiheadAttention
from .maps import attention_maps
from .mask import Tables, ViolinMask
from .plugging import freeze, is_plugged, mask_parameters, masks, param_groups, plug, thaw, unplug
from .weights import VERSION as __version__
from .weights import load, load_state, model_config, save, translate

if TYPE_CHECKING:
    from . import plot

LIBRARY = _library.PATH

__all__ = [
    "LIBRARY",
    "Attention",
    "Error",
    "MaskConfig",
    "MultiheadAttention",
    "Tables",
    "ViolinMask",
    "__version__",
    "attention_maps",
    "curves",
    "freeze",
    "is_plugged",
    "load",
    "load_state",
    "mask_parameters",
    "masks",
    "model_config",
    "ops",
    "param_groups",
    "plug",
    "save",
    "thaw",
    "translate",
    "unplug",
]


def __getattr__(name: str) -> Any:
    if name == "plot":  # matplotlib is optional and slow to import
        import importlib

        return importlib.import_module(".plot", __name__)
    raise AttributeError(f"module 'violin' has no attribute {name!r}")
