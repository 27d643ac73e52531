"""Fingerprint of this process's arithmetic, used to reject a worker whose results would differ before it joins.

The last bits of results depend on the number of threads, the vector instructions and the library versions. Each process
therefore runs a few operations of each kind on fixed pseudorandom numbers, and reports a digest of the results together
with the settings that affect them.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from operator import attrgetter

import torch
import torch.nn.functional as F


def lines() -> list[str]:
    """Return the settings and the digests of this process's arithmetic.

    Examples are ``arithmetic.threads 1`` and ``arithmetic.convolution 1f0a...``.

    The result is cached for the same settings. The computation takes about 50 ms on one core, and does not change
    random generators.
    """
    found = tuple(_settings())
    return [*found, *_measured(found)]


def _settings() -> list[str]:
    cpu = torch.backends.cpu.get_cpu_capability()
    settings = {
        "torch": torch.__version__,
        "instructions": cpu,
        "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "matmul_precision": _precision(torch.get_float32_matmul_precision),
        "denormals": "flushed" if _flushes() else "kept",
    }
    if torch.cuda.is_available():
        settings |= {
            "gpu": torch.cuda.get_device_name(),
            "tf32": _precision(
                lambda: f"{torch.backends.cuda.matmul.allow_tf32} {torch.backends.cudnn.allow_tf32}"
            ),
            "cudnn": f"{torch.backends.cudnn.version()} benchmark {torch.backends.cudnn.benchmark}",
            "cudnn_deterministic": torch.backends.cudnn.deterministic,
        }
    return [f"arithmetic.{name} {str(value).replace(' ', ',')}" for name, value in settings.items()]


def _precision(ask: Callable[[], str]) -> str:
    """Return the float32 precision from torch's older settings, or from the newer ones if a script has set those.

    Setting the newer ones disables the older ones.
    """
    try:
        return ask()
    except RuntimeError:
        names = ("mkldnn.matmul", "mkldnn.conv", "cuda.matmul", "cudnn.conv", "cudnn.rnn")
        found = ((name, attrgetter(name)(torch.backends).fp32_precision) for name in names)
        return " ".join(f"{name}={value}" for name, value in found)


def _flushes() -> bool:
    """Return whether `torch.set_flush_denormal` is on. torch has no function to query it."""
    return float(torch.tensor(1e-40, dtype=torch.float32, device="cpu") * 1.0) == 0.0


@functools.lru_cache(maxsize=4)
def _measured(settings: tuple[str, ...]) -> tuple[str, ...]:
    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    found = []
    for device in devices:
        for name, compute in _KINDS.items():
            numbers = torch.Generator(device="cpu").manual_seed(20)
            with torch.enable_grad():
                results = compute(functools.partial(_drawn, numbers, device))
            digest = hashlib.blake2b(digest_size=8)
            for each in results:
                content = each.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                digest.update(content.numpy().tobytes())
            place = "" if device == "cpu" else "gpu_"
            found.append(f"arithmetic.{place}{name} {digest.hexdigest()}")
    return tuple(found)


Draw = Callable[..., torch.Tensor]


def _drawn(numbers: torch.Generator, device: str, *shape: int) -> torch.Tensor:
    made = torch.randn(shape, generator=numbers, dtype=torch.float32, device="cpu").to(device)
    return made.requires_grad_()


def _with_gradients(result: torch.Tensor, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return [result, *torch.autograd.grad(result.square().mean(), inputs)]


def _matrix_product(draw: Draw) -> list[torch.Tensor]:
    left, right, bias = draw(96, 384), draw(256, 384), draw(256)
    return _with_gradients(F.linear(left, right, bias), left, right, bias)


def _convolution(draw: Draw) -> list[torch.Tensor]:
    pictures, weights = draw(8, 8, 24, 24), draw(16, 8, 3, 3)
    return _with_gradients(F.conv2d(pictures, weights, padding=1), pictures, weights)


def _normalization(draw: Draw) -> list[torch.Tensor]:
    rows, weight, bias = draw(64, 400), draw(400), draw(400)
    layer = F.layer_norm(rows, (400,), weight, bias)
    batch = F.batch_norm(rows, None, None, weight, bias, training=True)
    return _with_gradients(layer + batch, rows, weight, bias)


def _attention(draw: Draw) -> list[torch.Tensor]:
    query, key, value = draw(2, 4, 64, 32), draw(2, 4, 64, 32), draw(2, 4, 64, 32)
    found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    return _with_gradients(found, query, key, value)


def _functions(draw: Draw) -> list[torch.Tensor]:
    numbers = draw(20_000)
    found = [numbers.exp(), numbers.tanh(), F.gelu(numbers), numbers.abs().log(), numbers.sin()]
    return [*found, numbers.view(100, 200).softmax(-1), numbers.sigmoid()]


def _sums(draw: Draw) -> list[torch.Tensor]:
    numbers = draw(300_006)
    return [numbers.sum(), numbers.norm(), numbers.view(7, -1).sum(1), numbers.var()]


def _half_precision(draw: Draw) -> list[torch.Tensor]:
    left, right = draw(64, 256).bfloat16(), draw(128, 256).bfloat16()
    return [F.linear(left, right)]


_KINDS: dict[str, Callable[[Draw], list[torch.Tensor]]] = {
    "matrix_product": _matrix_product,
    "convolution": _convolution,
    "normalization": _normalization,
    "attention": _attention,
    "functions": _functions,
    "sums": _sums,
    "half_precision": _half_precision,
}
