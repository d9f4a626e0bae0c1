"""How much of a device a job uses: model FLOPs per second, and their share of what the device could do.

Model FLOPs utilisation (Chowdhery et al. 2022, "PaLM", appendix B): what the forward and backward pass need at least,
over what the hardware offers in that time. Computing activations anew is no model FLOP.
"""

from dataclasses import dataclass

from torch import nn

from disttrain_trainer.protocols import offered
from disttrain_trainer.runtime.errors import InvalidConfiguration

_TERA = 1e12
# Dense BF16 and FP16 of the vendors' data sheets, FLOP/s. The first name that stands in the device's own counts.
_PEAKS = {
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H200 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "A100": 312e12,
}


@dataclass(frozen=True)
class Work:
    """FLOPs of a forward and backward pass; None where the model does not say."""

    per_token: float | None = None
    per_sample: float | None = None

    def of(self, tokens: float | None, samples: float) -> float | None:
        """FLOPs of so many tokens (None: the data have none) or samples."""
        if self.per_token is not None and tokens is not None:
            return self.per_token * tokens
        return None if self.per_sample is None else self.per_sample * samples


def work_of(module: nn.Module) -> Work:
    """Results of the model's methods `flops_per_token()` and `flops_per_sample()`, if it has them.

    Raises InvalidConfiguration where the answer is no positive number.
    """
    return Work(_asked(module, "flops_per_token"), _asked(module, "flops_per_sample"))


def _asked(module: nn.Module, method: str) -> float | None:
    asked = offered(module, method)
    if asked is None:
        return None
    answer = asked()
    if not isinstance(answer, int | float) or not answer > 0:
        raise InvalidConfiguration(
            f"`training.model`: {type(module).__name__}.{method}() returned {answer!r:.80}, expected a positive number"
        )
    return float(answer)


def peak_flops(device_name: str) -> float | None:
    """FLOP/s of a GPU in BF16 and FP16, by the name that its driver gives it; None of those that are not known here."""
    return next((peak for name, peak in _PEAKS.items() if name in device_name), None)


def utilisation(flops: float | None, seconds: float, devices: int, peak: float | None) -> dict[str, float]:
    """`tflops`: 10^12 FLOP/s of each device; `mfu(%)`: of its peak. What is not known is left out."""
    if flops is None:
        return {}
    each = flops / seconds / devices
    return {"tflops": each / _TERA} | ({} if peak is None else {"mfu(%)": 100 * each / peak})
