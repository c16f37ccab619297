"""Scripts in several processes that form one group of torch.distributed."""

import subprocess
import sys
from pathlib import Path

import violin

BEGIN = """
import copy, os, sys
store, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
sys.path[:0] = sys.argv[4:]
import torch, torch.distributed as dist, violin
from standins import TorchvisionTransformer
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=world)
"""

END = """
dist.destroy_process_group()
print("done", flush=True)
os._exit(0)  # torch's threads for gloo do not always survive the interpreter's own end
"""


def run_in_group(script, world, folder):
    """The script in `world` processes, which knows `rank` and `world`; what they print where one of them fails."""
    paths = [Path(__file__).parent, Path(violin.__file__).parent.parent]
    running = [
        subprocess.Popen(
            [sys.executable, "-c", BEGIN + script + END, folder / "store", str(rank), str(world), *paths],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    for process in running:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0 and "done" in output, output
