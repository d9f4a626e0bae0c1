"""Models and data of a user, as entry points."""

import json
import os
import signal
import time
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils.data import Dataset, TensorDataset

from disttrain_api.builtin import GptConfig, MlpConfig
from disttrain_trainer.models.gpt import model as gpt
from disttrain_trainer.models.mlp import model as mlp

NOT_CALLABLE = 3


def double_mlp(hidden: int = 16, depth: int = 2) -> nn.Module:
    """6 numbers -> 5 classes in float64, where equality can be held to 1e-10."""
    sizes = [6, *[hidden] * depth]
    layers = [layer for i, o in pairwise(sizes) for layer in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 5)).double()


def double_samples(size: int = 50, seed: int = 5) -> tuple[Dataset, Dataset]:
    """50 samples: with a global batch of 24 the last batch of an epoch holds 2."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size + 11, 6, generator=generator, dtype=torch.float64)
    targets = torch.randint(5, (size + 11,), generator=generator)
    return TensorDataset(inputs[:size], targets[:size]), TensorDataset(inputs[size:], targets[size:])


def double_targets() -> tuple[Dataset, Dataset]:
    """The inputs of `double_samples` with five numbers each as targets."""
    return tuple(TensorDataset(part.tensors[0], part.tensors[0][:, :5]) for part in double_samples())


def bare_mlp() -> nn.Module:
    """A model that shows no layers."""

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden = nn.Linear(6, 8).double()
            self.out = nn.Linear(8, 5).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.hidden(x).tanh())

    return Bare()


class Times(nn.Module):
    """What comes in, times a number."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x.float() * self.factor


def lopsided() -> nn.Module:
    """6 numbers -> 5 logits. The first layer's gradients are a thousand times the second one's."""
    first, second = nn.Linear(6, 8), nn.Linear(8, 5)
    with torch.no_grad():
        first.weight.mul_(1e-3)
    return nn.Sequential(Times(1000.0), first, second)


class WithLoss(nn.Sequential):
    """Layers, and a loss of their own: cross-entropy, `reduced` as torch does it, "none" for each sample."""

    reduced = "none"

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, targets, reduction=self.reduced)


def mlp_with_loss(reduced: str = "none") -> nn.Module:
    """`double_mlp` with a loss."""
    model = WithLoss(*double_mlp())
    model.reduced = reduced
    return model


class DoubleTagger(nn.Module):
    """Tokens [B, T] -> logits [B, T, 7] in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 12)
        self.layers = nn.Sequential(nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 7)).double()
        self.embed.double()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embed(tokens))


def double_tagger() -> nn.Module:
    return DoubleTagger()


def ragged_tokens(size: int = 50) -> tuple[Dataset, None]:
    """Sequences in which 1 to 9 of 9 targets count; the others are torch's ignore_index."""
    generator = torch.Generator().manual_seed(6)
    tokens = torch.randint(7, (size, 9), generator=generator)
    targets = torch.randint(7, (size, 9), generator=generator)
    for index, row in enumerate(targets):
        row[1 + index % 9 :] = -100
    return TensorDataset(tokens, targets), None


def _print_phase(*_: Any) -> None:
    """What this rank says that it does."""
    path = Path(os.environ["DISTTRAIN_REPORT_DIR"], f"rank-{os.environ['RANK']}.json")
    # A rank of several jobs has its reports elsewhere.
    report = json.loads(path.read_text()) if path.exists() else {"phase": None, "totalSteps": 0}
    print(f"loaded while {report['phase']}, {report['totalSteps']} steps in all", flush=True)


def wide_mlp(dropout: float = 0.1) -> nn.Module:
    """Several DDP buckets (1 MiB, then 25 MiB), dropout, float32. The order of registration is not that of use."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(600, 5)
            self.first = nn.Linear(6, 600)
            self.middle = nn.ModuleList(nn.Linear(600, 600) for _ in range(3))
            self.dropout = nn.Dropout(dropout)
            self.register_load_state_dict_pre_hook(_print_phase)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x.float())
            for layer in reversed(self.middle):
                x = self.dropout(torch.relu(layer(x)))
            return self.last(x)

    return Wide()


def partly_used() -> nn.Module:
    """A parameter that no forward pass uses."""
    model = double_mlp()
    model.register_parameter("unused", nn.Parameter(torch.ones(3, dtype=torch.float64)))
    return model


class Before(Dataset):
    """The samples of another one; before each is read, something is done with its index."""

    def __init__(self, inner: Dataset, act: Callable[[int], object]) -> None:
        self.inner, self.act = inner, act

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.act(index)
        return self.inner[index]


def slow_samples(seconds: float = 0.01) -> tuple[Dataset, Dataset]:
    """Samples that take their time, so that a test can act between two steps."""
    training, held_out = double_samples()
    return Before(training, lambda index: time.sleep(seconds)), held_out


class Poisoned(Dataset):
    """Inputs that are not finite once `poison` is in the folder; says so by a file `go`."""

    def __init__(self, inner: Dataset, folder: Path) -> None:
        self.inner, self.folder = inner, folder

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.inner[index]
        if not (self.folder / "poison").exists():
            return inputs, target
        (self.folder / "go").touch()
        return inputs * torch.inf, target


def poisoned_samples(folder: str) -> tuple[Dataset, None]:
    return Poisoned(double_samples()[0], Path(folder)), None


def deadly_samples(rank: int) -> tuple[Dataset, None]:
    """Samples that kill this rank without a word once it has read thirty of them."""
    calls = count(1)

    def act(index: int) -> None:
        if next(calls) > 30 and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)

    return Before(double_samples()[0], act), None


def broken_model() -> nn.Module:
    """Fails in its first forward pass."""

    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            raise ZeroDivisionError("the user's own mistake")

    return Broken()


def no_model() -> str:
    return "not a module"


def unlike_samples() -> tuple[Dataset, None]:
    """Another number of samples on every rank."""
    return double_samples(50 + int(os.environ["RANK"]))[0], None


def normed_mlp() -> nn.Module:
    """With buffers that differ between ranks unless they are shared."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()


def counting_samples(folder: str) -> tuple[Dataset, Dataset]:
    """Held-out samples that note each reading in a file of this rank."""

    def note(index: int) -> None:
        with Path(folder, f"read-{os.environ['RANK']}").open("a") as file:
            file.write(f"{index}\n")

    training, held_out = double_samples()
    return training, Before(held_out, note)


def float_samples() -> tuple[Dataset, None]:
    """The training samples of `double_samples` in float32."""
    inputs, targets = double_samples()[0].tensors
    return TensorDataset(inputs.float(), targets), None


def waiting_samples(folder: str) -> None:
    """Never returns; says that it was called by a file."""
    Path(folder, "called").touch()
    while True:
        time.sleep(1)


class PlannedMlp(nn.Sequential):
    """6 numbers -> 5 classes in float64, with a tensor plan of its own."""

    def __init__(self, plan: str, hidden: int, inputs: int) -> None:
        super().__init__(nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, 5))
        self.double()
        self.plan = plan

    def tensor_plan(self, *, sequence: bool = False, vocabulary: bool = False) -> dict[str, ParallelStyle]:
        if sequence or vocabulary:
            raise ValueError("neither sequence nor vocabulary")
        found = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return found | {"3.missing": ColwiseParallel()} if self.plan == "nowhere" else found


def planned_mlp(plan: str, hidden: int = 8, inputs: int = 6) -> nn.Module:
    """With other `inputs` than 6 it fits no data, whole or cut."""
    return PlannedMlp(plan, hidden, inputs)


def double_gpt(double: bool = True, **config: Any) -> nn.Module:
    """The built-in Gpt, small, in float64; no parameter starts at zero, so that all can be compared."""
    sizes = {"vocabularySize": 16, "layers": 2, "heads": 4, "width": 16, "sequenceLength": 8}
    module = _moved(gpt.build(GptConfig.model_validate(sizes | config, by_alias=True)))
    return module if double else module.float()


def double_moe_gpt(uneven: bool = False, **config: Any) -> nn.Module:
    """The built-in Gpt with 4 experts, small, in float64. `uneven`: every token goes to the first, none to the last."""
    module = double_gpt(**{"experts": 4, **config})
    with torch.no_grad():
        for block in module.blocks if uneven else ():
            # The first feature is positive for every token, and the router looks at it.
            block.norm2.bias[0] = 6.0
            block.feed_forward.router.weight[:, 0] = torch.tensor([1.0, 0.0, 0.0, -1.0])
            # Without tokens it stays what it is.
            block.feed_forward.experts.contract[-1] = 0.0
    return module


def gpt_without_short_inputs(shortest: int, rank: int, **config: Any) -> nn.Module:
    """The built-in Gpt, which on one rank raises in an evaluation where the input is shorter."""
    module = double_gpt(**config)

    def check(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if not layer.training and os.environ["RANK"] == str(rank) and inputs[0].shape[1] < shortest:
            raise ValueError("an input that is too short")

    module.register_forward_pre_hook(check)
    return module


def double_builtin_mlp(depth: int = 2) -> nn.Module:
    """The built-in Mlp in float64, for `double_samples`."""
    return _moved(mlp.build(MlpConfig(hidden_sizes=[8] * depth, input_size=6, output_size=5)))


def _moved(module: nn.Module) -> nn.Module:
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return module


def double_tokens() -> tuple[Dataset, Dataset]:
    """50 + 11 sequences of 8 tokens below 16, each followed by a rule that can be learned."""
    generator = torch.Generator().manual_seed(5)
    sequences = torch.randint(0, 16, (61, 1), generator=generator) + torch.arange(9) * torch.randint(
        1, 4, (61, 1), generator=generator
    )
    pairs = [(sequence[:-1] % 16, sequence[1:] % 16) for sequence in sequences]
    return pairs[:50], pairs[50:]


def fixed_gradient() -> nn.Module:
    """6 numbers -> 5 logits that do not depend on the only parameter; its gradient is that of a linear layer."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(24, 6, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            out = (x @ self.weight.T).view(len(x), 6, 4).sum(2)[:, :5]
            return out - out.detach()

    return Fixed()


def steep_on_one_rank() -> nn.Module:
    """On rank 1 a gradient that is not finite, of a loss that is."""

    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = double_mlp()
            self.root = nn.Parameter(torch.zeros((), dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            outputs = self.inner(x)
            return outputs + self.root.sqrt() * outputs if os.environ["RANK"] == "1" else outputs

    return Steep()


def tagging_layers() -> nn.Module:
    """Tokens [B, T] -> logits [B, T, 7]; the layers of two stages."""
    return nn.Sequential(nn.Embedding(7, 12), nn.Linear(12, 7))


def table_of_samples(size: int) -> nn.Module:
    """Number of a sample -> 5 classes: a row for each sample, which nothing but that sample changes."""
    table = nn.Embedding(size, 5).double()
    nn.init.zeros_(table.weight)
    return table


def numbered_samples(size: int) -> tuple[Dataset, None]:
    """Samples that are their own number."""
    numbers = torch.arange(size)
    return TensorDataset(numbers, numbers % 5), None


def growing_tokens(size: int = 20) -> tuple[Dataset, None]:
    """Sequences of two lengths."""

    class Growing(Dataset):
        def __len__(self) -> int:
            return size

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            tokens = torch.arange(4 + index % 2) % 7
            return tokens, tokens

    return Growing(), None
