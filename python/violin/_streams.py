"""What is kept between calls, and others read on a GPU: streams of other threads, and CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes


def captured() -> bool:
    """Whether a CUDA graph is made of this call. It reads addresses for as long as it lives, and nobody knows how long."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def complete(tensors: Iterable[Tensor | None]) -> torch.cuda.Stream | None:
    """Waits for tensors that will be kept: the streams of other threads do not wait for this one, which is returned."""
    device = next((tensor.device for tensor in tensors if tensor is not None and tensor.is_cuda), None)
    if device is None:
        return None
    stream = torch.cuda.current_stream(device)
    stream.synchronize()
    return stream


def lend(tensors: Iterable[Tensor | None], made_in: torch.cuda.Stream | None) -> None:
    """Kept tensors are read here: their memory is not given away before this stream is done with them."""
    if made_in is None:
        return
    reader = torch.cuda.current_stream(made_in.device)
    if reader != made_in:
        with _disable_current_modes():
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(reader)
