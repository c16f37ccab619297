"""What torch.compile's default backend needs beside torch."""

import os
import shutil
import sysconfig

import pytest


def missing():
    """What inductor would look for in vain on this machine; empty where it can run."""
    if not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")):
        return "Python.h (apt-get install python3-dev)"
    return "" if shutil.which(os.environ.get("CXX", "g++")) else "a C++ compiler"


def skip_inductor(items):
    """Tests with the backend "inductor" are skipped, and say so, where it cannot run."""
    reason = missing()
    for item in items:
        if reason and hasattr(item, "callspec") and "inductor" in item.callspec.params.values():
            item.add_marker(pytest.mark.skip(reason=f"torch.compile's inductor needs {reason}"))
