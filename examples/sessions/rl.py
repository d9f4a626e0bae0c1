"""Reinforcement learning with a session: REINFORCE (Williams 1992) with rollouts in its own environment.

An agent on a line of 9 places walks to the place that it is shown; the reward of an episode rises towards 1. The
environments are registered like model and optimizer, so a resumed run goes on in the middle of their episodes.
"""

import random
from typing import Any

import torch
from torch import nn

import disttrain

PLACES = 9
LONGEST = 12


class Line:
    """An agent at a place on a line, and a goal that it must reach; an episode has at most 12 moves."""

    def __init__(self) -> None:
        self.at = self.goal = self.moves = 0
        self.reset()

    def reset(self) -> None:
        self.at, self.goal, self.moves = random.randrange(PLACES), random.randrange(PLACES), 0

    def seen(self) -> torch.Tensor:
        """Return the observation, of shape [2]: the agent's place and the goal, each between 0 and 1."""
        return torch.tensor([self.at, self.goal]) / (PLACES - 1)

    def move(self, right: bool) -> tuple[float, bool]:
        """Move, and return the reward and whether the episode is over."""
        self.at = min(max(self.at + (1 if right else -1), 0), PLACES - 1)
        self.moves += 1
        reached = self.at == self.goal
        return float(reached), reached or self.moves == LONGEST

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "goal": self.goal, "moves": self.moves}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.goal, self.moves = state["at"], state["goal"], state["moves"]


def rollout(policy: nn.Module, line: Line, episodes: int, device: torch.device) -> tuple[torch.Tensor, float]:
    """Play episodes to their end; return the policy's loss and the mean reward of an episode."""
    losses, rewards = [], []
    for _ in range(episodes):
        chosen, over, reward = [], False, 0.0
        while not over:
            move = torch.distributions.Bernoulli(logits=policy(line.seen().to(device)).squeeze())
            right = move.sample()
            chosen.append(move.log_prob(right))
            reward, over = line.move(bool(right))
        line.reset()
        losses.append(-(reward - 0.5) * torch.stack(chosen).sum())
        rewards.append(reward)
    return torch.stack(losses).mean(), sum(rewards) / episodes


def main() -> None:
    with disttrain.session(steps=60, checkpoint_interval=20) as session:
        policy = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
        policy, optimizer = session.prepare(policy, torch.optim.Adam(policy.parameters(), lr=0.02))
        line = Line()
        session.restore(policy=policy, optimizer=optimizer, line=line)
        while not session.finished:
            loss, reward = rollout(policy, line, episodes=16, device=session.device)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            session.step(loss=loss, reward=reward)


if __name__ == "__main__":
    main()
