"""Checks of the kernels for layer norm and for sums over rows (rows.cu), for check_kernels.py."""
import itertools

import torch

SHAPES = ((1, 4), (3, 64), (37, 192), (130, 384), (5, 1024), (300, 8), (2, 132))
TYPES = ((torch.float32, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float16),
         (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16))


def largest(x):
    return float(x.abs().max())


def norm(x, weight, bias, dtype):
    """Layer norm as torch has it, in the precision of the parameters, and the result as dtype."""
    return torch.nn.functional.layer_norm(x.to(weight.dtype), x.shape[-1:], weight, bias, 1e-6).to(dtype)


def norm_with_gradients(x, weight, bias, dy, dtype):
    leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
    y = norm(*leaves, dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]


def check_rows(kernels, only):
    """No further from float64 than torch's, twice the difference and a few roundings allowed; the same bits in every run."""
    failures = 0
    for (rows, columns), (x_type, y_type) in itertools.product(SHAPES, TYPES):
        name = f"rows {rows}x{columns} {str(x_type)[6:]} to {str(y_type)[6:]}"
        if only and only not in name:
            continue
        g = torch.Generator(kernels.device).manual_seed(3)
        rand = lambda *s: torch.randn(*s, generator=g, device=kernels.device)
        x, dy = (3 * rand(rows, columns) + 1).to(x_type), rand(rows, columns).to(y_type)
        weight, bias = 1 + 0.1 * rand(columns), rand(columns)

        def ours():
            y, mean, rstd = kernels.norm_forward(x, weight, bias, y_type)
            return [y, *kernels.norm_backward(dy, x, mean, rstd, weight), kernels.column_sums(x)]

        truth = [*norm_with_gradients(x.double(), weight.double(), bias.double(), dy, torch.float64), x.double().sum(0)]
        plain = [*norm_with_gradients(x, weight, bias, dy, y_type), x.float().sum(0)]
        got = ours()
        kernels.order(7)
        again = ours()
        kernels.order(0)
        wrong = []
        for what, a, b, p, t in zip(("y", "dx", "dweight", "dbias", "sums"), got, again, plain, truth):
            e = largest(a.double() - t)
            allowed = 2 * largest(p.double() - t) + 8 * torch.finfo(torch.float32).eps * max(1.0, largest(t))
            if not e <= allowed:
                wrong.append(f"{what} {e:.2e}, allowed {allowed:.2e}")
            if not torch.equal(a, b):
                wrong.append(f"{what}: bits differ")
        if wrong:
            failures += 1
            print("FAIL", name, "; ".join(wrong), flush=True)
    return failures
