"""When a rank asks what some rank was asked for: once per step, before its last update where it knows which."""

import torch

from disttrain_session.stop_agreement import Answer, Asked, StopAgreement


class Script:
    """A rank that has updates and steps; `asked` has a line for each question: after how many updates it was sent."""

    def __init__(self) -> None:
        self.requested = Asked(stop=False, save=False)
        self.asked: list[int] = []
        self._updates = 0
        self.agreement = StopAgreement(self._ask)
        self._optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=0.1)
        self.agreement.watch([self._optimizer])

    def _ask(self) -> Answer:
        self.asked.append(self._updates)
        known = self.requested
        return lambda: known

    def step(self, updates: int) -> Asked:
        self._updates = 0
        for _ in range(updates):
            self._optimizer.step()
            self._updates += 1
        return self.agreement.asked()


def test_each_step_asks_once_and_before_the_last_of_as_many_updates_as_the_step_before() -> None:
    script = Script()
    for updates in (1, 1, 3, 3, 0, 2, 1, 1):
        script.step(updates)
    assert script.asked == [1, 0, 0, 2, 0, 2, 1, 0]


def test_a_request_is_known_in_its_own_step_or_the_next() -> None:
    script = Script()
    script.step(1)
    script.requested = wanted = Asked(stop=False, save=True)
    assert script.step(1) == wanted
    script.requested = none = Asked(stop=False, save=False)
    assert script.step(2) == none
    assert script.step(0) == none
