"""The CUDA launchers on torch tensors, through a small shared library (kernels_api.cpp), without the operators.

A library that is built with emulator/ runs the kernels' PTX on the processor, on tensors that are there too."""
import ctypes
import math

import torch

I64, PTR, F64, I32 = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double, ctypes.c_int
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}


class Heads(ctypes.Structure):
    _fields_ = [("data", PTR), ("batch", I64), ("head", I64), ("token", I64)]


class Table(ctypes.Structure):
    _fields_ = [("data", PTR), ("group", I64), ("head", I64), ("row", I64), ("packed", ctypes.c_bool)]


class Shape(ctypes.Structure):
    _fields_ = [(n, I64) for n in ("batch", "heads", "queries", "keys", "dim", "groups")]


class Forward(ctypes.Structure):
    _fields_ = ([("shape", Shape), ("dtype", I32), ("scale", F64)] + [(n, Heads) for n in "qkv"]
                + [(n, Table) for n in ("gain", "bias", "gate")] + [("out", Heads), ("lse", PTR)])


class Backward(ctypes.Structure):
    _fields_ = ([("shape", Shape), ("dtype", I32), ("scale", F64)] + [(n, Heads) for n in ("q", "k", "v", "out", "dout")]
                + [("lse", PTR)] + [(n, Table) for n in ("gain", "bias", "gate")] + [(n, Heads) for n in ("dq", "dk", "dv")]
                + [(n, PTR) for n in ("dgain", "dbias", "dgate")])


class Mask(ctypes.Structure):
    _fields_ = ([(n, I64) for n in ("groups", "curves", "axes", "tokens", "heads", "prefix")] + [("dtype", I32)]
                + [(n, ctypes.c_bool) for n in ("log_space", "decay_per_axis")]
                + [(n, PTR) for n in ("ranks", "log_decay", "weight", "prefix_decay")])


class MaskForward(ctypes.Structure):
    _fields_ = [("mask", Mask), ("out", PTR)]


class MaskBackward(ctypes.Structure):
    _fields_ = [("mask", Mask)] + [(n, PTR) for n in ("dout", "dlog_decay", "dweight", "dprefix_decay")]


class Gain(ctypes.Structure):
    _fields_ = [("mask", Mask), ("alpha", PTR), ("offset", ctypes.c_float)]


class GainForward(ctypes.Structure):
    _fields_ = [("gain", Gain), ("dtype", I32), ("out", PTR)]


class GainBackward(ctypes.Structure):
    _fields_ = ([("gain", Gain), ("dgain", PTR * 64), ("layers", I32)]
                + [(n, PTR) for n in ("dlog_decay", "dweight", "dprefix_decay", "dalpha")])


class NormForward(ctypes.Structure):
    _fields_ = ([("rows", I64), ("columns", I64), ("eps", F64), ("x_type", I32), ("y_type", I32)]
                + [(n, PTR) for n in ("x", "weight", "bias", "y", "mean", "rstd")])


class NormBackward(ctypes.Structure):
    _fields_ = ([("rows", I64), ("columns", I64), ("x_type", I32), ("y_type", I32)]
                + [(n, PTR) for n in ("dy", "x", "mean", "rstd", "weight", "dx", "dweight", "dbias")])


class Sums(ctypes.Structure):
    _fields_ = [("rows", I64), ("columns", I64), ("type", I32), ("x", PTR), ("sums", PTR)]


TILE, RECORD = 64, 64 * 128 + 128


def unpacked(records, dtype, size):
    """Records of a table [G,h,key tiles,query tiles,bytes] as the table in float64, and per number the largest error that its
    16 bits may have."""
    G, h, tiles = records.shape[:3]
    rows = records[..., :TILE * 128].reshape(G, h, tiles, tiles, TILE, 8, 16)
    piece = torch.arange(8, device=records.device) ^ (torch.arange(TILE, device=records.device) % 8)[:, None]
    rows = rows.gather(-2, piece[..., None].expand(*rows.shape[:-2], 8, 16))
    rows = rows.contiguous().view(G, h, tiles, tiles, TILE, 128)
    ranges = records[..., TILE * 128:].contiguous().view(torch.float32)
    base, slope = (ranges[..., x].double()[..., None, None] for x in (0, 1))
    if dtype == torch.bfloat16:
        numbers, precise = rows.view(torch.float16).double(), 5e-4
    else:
        bits = rows.view(torch.int16).int() & 0xffff
        numbers, precise = ((bits << 8) + 0x3f000000).view(torch.float32).double(), 1.6e-5
    table = (base + slope * numbers).permute(0, 1, 3, 4, 2, 5)
    allowed = (precise * slope.abs()).expand_as(numbers).permute(0, 1, 3, 4, 2, 5)
    return tuple(x.reshape(G, h, tiles * TILE, tiles * TILE)[..., :size, :size] for x in (table, allowed))


def heads(x):
    return Heads() if x is None else Heads(x.data_ptr(), x.stride(0), x.stride(1), x.stride(2))


def table(x):
    """x [G, h or 1, Nq, Nk] with unit stride along the keys."""
    return Table() if x is None else Table(x.data_ptr(), x.stride(0), x.stride(1) if x.size(1) > 1 else 0, x.stride(2))


def pointer(x):
    return None if x is None else x.data_ptr()


def storage(x):
    """The memory that a tensor lies in: address and bytes."""
    whole = x.untyped_storage()
    return whole.data_ptr(), whole.nbytes()


def start_emulator(lib):
    """Gives the emulated device of a library that was built with emulator/ its programs."""
    lib.emulator_error.restype = ctypes.c_char_p
    lib.emulator_allow.argtypes = [PTR, ctypes.c_size_t]
    lib.emulator_order.argtypes = [ctypes.c_uint64]
    lib.emulator_offer_shared.argtypes = [ctypes.c_size_t]
    lib.emulator_ptx_list.restype = ctypes.c_char_p
    with open(lib.emulator_ptx_list().decode()) as files:
        for path in files.read().split("\n"):
            if path and lib.emulator_load(path.encode()):
                raise RuntimeError(lib.emulator_error().decode())


class Kernels:
    def __init__(self, library):
        self.lib = ctypes.CDLL(library)
        self.emulated = hasattr(self.lib, "emulator_load")
        self.device = "cpu" if self.emulated else "cuda"
        if self.emulated:
            start_emulator(self.lib)
        for name in ("attention_forward", "attention_backward", "decay_mask_forward", "decay_mask_backward",
                     "decay_gain_forward", "decay_gain_backward", "layer_norm_forward", "layer_norm_backward", "column_sums"):
            getattr(self.lib, name + "_scratch").restype = ctypes.c_size_t

    def order(self, seed):
        """In which order an emulated device runs its threads and lets copies land; 0: in turns, at once. A real one takes
        its own order."""
        if self.emulated:
            self.lib.emulator_order(seed)

    def offer_shared(self, bytes):
        """Shared memory that a block of an emulated device can have: 227 KiB on Hopper, 163 on Ampere, 99 on its smaller chips."""
        self.lib.emulator_offer_shared(bytes)

    def _run(self, name, p, tensors, *path, poison=False):
        """tensors: all that the kernels may touch."""
        size = getattr(self.lib, name + "_scratch")(ctypes.byref(p), *path)
        # Scratch ends where it ends: what an allocation has beyond that is not for kernels to touch.
        scratch = torch.empty(max(size, 1), dtype=torch.uint8, device=self.device)
        if poison:
            scratch.fill_(255)  # numbers that are none
        stream = None
        if self.emulated:
            self.lib.emulator_forget()
            for x in (scratch, *tensors):
                if x is not None:
                    self.lib.emulator_allow(*storage(x))
        else:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        error = getattr(self.lib, name)(ctypes.byref(p), *path, ctypes.c_void_p(scratch.data_ptr()), stream)
        if error:
            what = self.lib.emulator_error().decode() if self.emulated else f"CUDA error {error}"
            raise RuntimeError(f"{name}: {what}")
        self.scratch = size

    def forward(self, q, k, v, gain=None, bias=None, gate=None, scale=None, path=90):
        B, h, nq, d = q.shape
        groups = next((t.size(0) for t in (gain, bias, gate) if t is not None), 1)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        out = torch.empty(B, nq, h, d, dtype=q.dtype, device=q.device).transpose(1, 2)
        lse = torch.empty(B, h, nq, dtype=wide, device=q.device)
        p = Forward(Shape(B, h, nq, k.size(2), d, groups), DTYPES[q.dtype], scale or 1 / math.sqrt(d), heads(q), heads(k),
                    heads(v), table(gain), table(bias), table(gate), heads(out), lse.data_ptr())
        self.used_sm90 = path == 90 and bool(self.lib.attention_forward_uses_sm90(ctypes.byref(p)))
        self._run("attention_forward", p, (q, k, v, gain, bias, gate, out, lse), path)
        return out, lse

    def backward(self, q, k, v, out, lse, dout, gain=None, bias=None, gate=None, scale=None, path=90, need=(1,) * 6,
                 poison=True, room=0):
        """poison: scratch and what is not written are NaN; filling takes time that a bench should not count. room: for scratch."""
        B, h, nq, d = q.shape
        nk = k.size(2)
        groups = next((t.size(0) for t in (gain, bias, gate) if t is not None), 1)
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32

        def result(shape, dtype):
            empty = torch.empty(shape, dtype=dtype, device=q.device)
            return empty.fill_(float("nan")) if poison else empty

        grads = [result((B, n, h, d), q.dtype).transpose(1, 2) if wanted else None for n, wanted in zip((nq, nk, nk), need)]
        tables = [result((groups, h, nq, nk), wide) if wanted and t is not None else None
                  for t, wanted in zip((gain, bias, gate), need[3:])]
        p = Backward(Shape(B, h, nq, nk, d, groups), DTYPES[q.dtype], scale or 1 / math.sqrt(d), heads(q), heads(k), heads(v),
                     heads(out), heads(dout), lse.data_ptr(), table(gain), table(bias), table(gate),
                     *(heads(g) for g in grads), *(pointer(t) for t in tables))
        self.used_sm90 = path == 90 and bool(self.lib.attention_backward_uses_sm90(ctypes.byref(p)))
        self._run("attention_backward", p, (q, k, v, out, lse, dout, gain, bias, gate, *grads, *tables), path,
                  ctypes.c_size_t(room), poison=poison)
        return (*grads, *tables)

    @staticmethod
    def _backward_of(B, h, N, d, address=1 << 20, dtype=torch.bfloat16):
        own = Heads(address, 3 * N * h * d, d, 3 * h * d)
        gain = Table(1 << 20, 0, N * N, N) if dtype in (torch.float32, torch.float64) else Table(1 << 20, 0, 1, 0, True)
        return Backward(Shape(B, h, N, N, d, 1), DTYPES[dtype], 1 / math.sqrt(d), own, own, own, own, own, 1 << 20, gain,
                        Table(), Table(), own, own, own, 1 << 20, None, None)

    def backward_scratch(self, B, h, N, d=64, path=90, dtype=torch.bfloat16, room=0):
        """Bytes beside a packed gain, or a wide one beside wide numbers, all gradients wanted. Nothing is read: any address
        will do."""
        p = self._backward_of(B, h, N, d, dtype=dtype)
        return self.lib.attention_backward_scratch(ctypes.byref(p), path, ctypes.c_size_t(room))

    def forward_scratch(self, B, h, N, d=64, path=90):
        """Bytes beside a float gain. Nothing is read here either."""
        own = Heads(1 << 20, 3 * N * h * d, d, 3 * h * d)
        p = Forward(Shape(B, h, N, N, d, 1), DTYPES[torch.bfloat16], 1 / math.sqrt(d), own, own, own,
                    Table(1 << 20, 0, N * N, N), Table(), Table(), own, 1 << 20)
        return self.lib.attention_forward_scratch(ctypes.byref(p), path)

    def takes_sm90(self, d, address=1 << 20):
        """Whether the Hopper kernels would take both passes over packed q, k, v with heads of d numbers at this address."""
        b = self._backward_of(2, 3, 100, d, address)
        f = Forward(b.shape, b.dtype, b.scale, b.q, b.k, b.v, b.gain, Table(), Table(), b.dq, 1 << 20)
        return [bool(self.lib.attention_forward_uses_sm90(ctypes.byref(f))),
                bool(self.lib.attention_backward_uses_sm90(ctypes.byref(b)))]

    def _mask(self, ranks, log_decay, weight, prefix, prefix_decay, log_space):
        G, C, A, N = ranks.shape
        return Mask(G, C, A, N, log_decay.size(-1), prefix, DTYPES[log_decay.dtype], log_space, log_decay.dim() == 3,
                    pointer(ranks), pointer(log_decay), pointer(weight), pointer(prefix_decay))

    def mask_forward(self, ranks, log_decay, weight=None, prefix=0, prefix_decay=None, log_space=False):
        """ranks int32 [G,C,A,N]."""
        m = self._mask(ranks, log_decay, weight, prefix, prefix_decay, log_space)
        size = prefix + ranks.size(3)
        out = torch.full((ranks.size(0), log_decay.size(-1), size, size), float("nan"), dtype=log_decay.dtype, device=self.device)
        self._run("decay_mask_forward", MaskForward(m, out.data_ptr()), (ranks, log_decay, weight, prefix_decay, out))
        return out

    def mask_backward(self, dout, ranks, log_decay, weight=None, prefix=0, prefix_decay=None, log_space=False):
        m = self._mask(ranks, log_decay, weight, prefix, prefix_decay, log_space)
        grads = [None if x is None else torch.full_like(x, float("nan")) for x in (log_decay, weight, prefix_decay)]
        self._run("decay_mask_backward", MaskBackward(m, dout.data_ptr(), *(pointer(g) for g in grads)),
                  (dout, ranks, log_decay, weight, prefix_decay, *grads))
        return grads

    def gain_forward(self, dtype, ranks, log_decay, weight=None, prefix=0, prefix_decay=None, alpha=None, offset=0.0):
        """Records, uint8 [G,h,key tiles,query tiles,bytes]."""
        gain = Gain(self._mask(ranks, log_decay, weight, prefix, prefix_decay, False), pointer(alpha), offset)
        tiles = -(-(prefix + ranks.size(3)) // TILE)
        out = torch.full((ranks.size(0), log_decay.size(-1), tiles, tiles, RECORD), 255, dtype=torch.uint8, device=self.device)
        self._run("decay_gain_forward", GainForward(gain, DTYPES[dtype], out.data_ptr()),
                  (ranks, log_decay, weight, prefix_decay, alpha, out))
        return out

    def gain_backward(self, dgain, ranks, log_decay, weight=None, prefix=0, prefix_decay=None, alpha=None, offset=0.0):
        """dgain: a tensor, or one per layer, of consecutive heads."""
        layers = dgain if isinstance(dgain, list) else [dgain]
        gain = Gain(self._mask(ranks, log_decay, weight, prefix, prefix_decay, False), pointer(alpha), offset)
        grads = [None if x is None else torch.full_like(x, float("nan")) for x in (log_decay, weight, prefix_decay, alpha)]
        self._run("decay_gain_backward", GainBackward(gain, (PTR * 64)(*map(pointer, layers)), len(layers),
                                                      *(pointer(g) for g in grads)),
                  (ranks, log_decay, weight, prefix_decay, alpha, *layers, *grads), poison=True)
        return grads

    def norm_forward(self, x, weight, bias, dtype, eps=1e-6):
        """Rows x [R,C], as dtype; also their means and inverse deviations."""
        y = torch.full(x.shape, float("nan"), dtype=dtype, device=self.device)
        mean, rstd = (torch.full((x.size(0),), float("nan"), device=self.device) for _ in range(2))
        self._run("layer_norm_forward", NormForward(*x.shape, eps, DTYPES[x.dtype], DTYPES[dtype],
                                                    *map(pointer, (x, weight, bias, y, mean, rstd))),
                  (x, weight, bias, y, mean, rstd))
        return y, mean, rstd

    def norm_backward(self, dy, x, mean, rstd, weight):
        dx, *rest = torch.full_like(x, float("nan")), *(torch.full_like(weight, float("nan")) for _ in range(2))
        tensors = (dy, x, mean, rstd, weight, dx, *rest)
        self._run("layer_norm_backward", NormBackward(*x.shape, DTYPES[x.dtype], DTYPES[dy.dtype], *map(pointer, tensors)),
                  tensors, poison=True)
        return dx, *rest

    def column_sums(self, x):
        sums = torch.full((x.size(1),), float("nan"), device=self.device)
        self._run("column_sums", Sums(*x.shape, DTYPES[x.dtype], x.data_ptr(), sums.data_ptr()), (x, sums), poison=True)
        return sums
