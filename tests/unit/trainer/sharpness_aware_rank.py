"""A rank of a trainer that has one technique more: the line that a technique adds to strategies/choose.py."""

from disttrain_trainer.strategies.choose import STRATEGIES
from tests.unit.trainer import cases
from tests.unit.trainer.sharpness_aware import CHOICE

if __name__ == "__main__":
    STRATEGIES.insert(0, CHOICE)
    cases.main()
