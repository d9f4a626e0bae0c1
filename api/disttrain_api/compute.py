"""How a step is computed: number formats, kernels, and which activations are kept."""

from enum import StrEnum


class Precision(StrEnum):
    """Number format of the forward and backward pass; parameters stay FP32."""

    FP32 = "FP32"
    TF32 = "TF32"
    BF16 = "BF16"
    FP16 = "FP16"


class Float8Recipe(StrEnum):
    """What shares a scale when the factors of a linear layer's products are rounded to FP8."""

    TENSORWISE = "Tensorwise"
    ROWWISE = "Rowwise"


class Attention(StrEnum):
    """Kernel of torch's scaled_dot_product_attention."""

    FLASH = "Flash"
    CUDNN = "CuDNN"
    EFFICIENT = "Efficient"
    MATH = "Math"


class ActivationCheckpointing(StrEnum):
    """Which activations the backward pass computes anew instead of keeping them."""

    NONE = "None"
    SELECTIVE = "Selective"
    FULL = "Full"
