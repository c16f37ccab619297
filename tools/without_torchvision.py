"""Lets timm's models be imported where torchvision is not: only timm's data pipelines use it.

install() puts a finder behind the others, so a torchvision that is there comes first. In the stand-in every name is an empty
class.
"""

import enum
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types


class _Anything(types.ModuleType):
    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        modes = {mode: mode.lower() for mode in ("NEAREST", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS")}
        value = enum.Enum(name, modes) if name == "InterpolationMode" else type(name, (), {})
        setattr(self, name, value)
        return value


class _StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Anything(spec.name)

    def exec_module(self, module):
        pass


def install():
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(_StandIn())
