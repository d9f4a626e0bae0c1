"""A generative adversarial network with a session: two models, two optimizers, your own training loop.

The generator learns points on a circle of radius 2; the distance of its points from the circle falls.
Run it as it is (`python gan.py`), under `torchrun --nproc-per-node=2 gan.py`, or as the job in gan.yaml.
"""

import math

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy

import disttrain

NOISE = 4


class Circle:
    """4096 points around the circle, each a tensor of shape [2]."""

    def __init__(self) -> None:
        angles = torch.arange(4096) * (2 * math.pi / 4096)
        self._points = 2 * torch.stack([angles.cos(), angles.sin()], dim=1)

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._points[index]


def network(inputs: int, outputs: int) -> nn.Module:
    layers = nn.Sequential(nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2))
    return layers.append(nn.Linear(64, outputs))


def main() -> None:
    with disttrain.session(steps=120, checkpoint_interval=40) as session:
        generator, discriminator = network(NOISE, 2), network(2, 1)
        generator, generator_optimizer = session.prepare(
            generator, torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
        )
        discriminator, discriminator_optimizer = session.prepare(
            discriminator, torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.99))
        )
        batches = session.loader(Circle(), batch_size=64)
        session.restore(
            generator=generator,
            discriminator=discriminator,
            generator_optimizer=generator_optimizer,
            discriminator_optimizer=discriminator_optimizer,
        )
        for real in batches:
            fake = generator(torch.randn(len(real), NOISE, device=session.device))

            # One forward pass for both: DDP takes one before each backward pass.
            scores = discriminator(torch.cat([real, fake.detach()]))
            labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(real), 1)]).to(session.device)
            discriminator_loss = cross_entropy(scores, labels)
            discriminator_optimizer.zero_grad()
            discriminator_loss.backward()
            discriminator_optimizer.step()

            scores = discriminator(fake)
            generator_loss = cross_entropy(scores, torch.ones_like(scores))
            generator_optimizer.zero_grad()
            generator_loss.backward()
            generator_optimizer.step()

            distance = (fake.detach().norm(dim=1) - 2).abs().mean()
            session.step(loss=generator_loss, discriminator_loss=discriminator_loss, distance=distance)


if __name__ == "__main__":
    main()
