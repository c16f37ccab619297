"""Runs pytest on the given files; 77, which ctest takes for skipped, where there is no pytest."""

import sys

try:
    import pytest
except ImportError:
    print("skipped: this interpreter has no pytest (pip install pytest)")
    sys.exit(77)
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
