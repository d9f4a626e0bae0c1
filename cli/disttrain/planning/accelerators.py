"""What accelerators can do, after their vendors' data sheets. Pure."""

from dataclasses import dataclass

from disttrain_api.compute import Precision

USUAL_EFFICIENCY = 0.4
"""The part of the peak that training of large transformers usually reaches (Chowdhery et al. 2022, appendix B)."""
_TERA, _GIB = 1e12, 2**30


@dataclass(frozen=True)
class Accelerator:
    """Dense FLOP/s, and bytes of memory as the driver says them."""

    memory: int
    half: float
    """BF16 and FP16."""
    tf32: float
    fp32: float

    def flops(self, precision: Precision) -> float:
        """Return the FLOP/s of the peak."""
        match precision:
            case Precision.FP32:
                return self.fp32
            case Precision.TF32:
                return self.tf32
            case _:
                return self.half


def _of(memory: float, half: float, tf32: float, fp32: float) -> Accelerator:
    return Accelerator(int(memory * _GIB), half * _TERA, tf32 * _TERA, fp32 * _TERA)


ACCELERATORS = {
    "A100-40GB": _of(39.4, 312, 156, 19.5),
    "A100": _of(79.1, 312, 156, 19.5),
    "H100": _of(79.1, 989, 494.5, 66.9),
    "H100-PCIe": _of(79.1, 756, 378, 51.2),
    "H200": _of(139.8, 989, 494.5, 66.9),
    "B200": _of(178.3, 2250, 1125, 75),
    "L4": _of(22.0, 121, 60.5, 30.3),
    "L40S": _of(44.4, 362, 183, 91.6),
    "MI300X": _of(191.5, 1307, 653.7, 163.4),
}
"""By the name that `--accelerator` takes."""
