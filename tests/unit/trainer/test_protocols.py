"""What a user's objects may offer is offered by an example or by what is built in, as protocols.py has it."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from disttrain_api.builtin import GptConfig
from disttrain_trainer import protocols
from disttrain_trainer.data.texts.lanes import Lanes
from disttrain_trainer.models.gpt import model as gpt
from disttrain_trainer.models.transformers.model import CausalLanguageModel
from disttrain_trainer.parallel.context.ulysses import Ulysses
from examples.tasks.callbacks import Best, TailAverage
from examples.tasks.contrastive import Contrastive
from examples.tasks.distillation import Distillation
from examples.tasks.dpo import Dpo
from examples.tasks.masked import Masked
from examples.tasks.stream import Streamed
from examples.user_model import build_model, load_data


def small_gpt() -> Any:
    return gpt.build(GptConfig(vocabulary_size=16, layers=1, heads=2, width=8, sequence_length=8))


OFFERED: dict[type, Callable[[], Any]] = {
    protocols.MapDataset: lambda: load_data(50)[0],
    protocols.IterableDataset: lambda: Streamed().data()[0],
    protocols.OffersOtherParts: lambda: Lanes(lambda number: [], 1, 1, 0),
    protocols.OffersLayers: small_gpt,
    protocols.OffersTensorPlan: small_gpt,
    protocols.OffersOutputLayers: small_gpt,
    protocols.OffersContext: small_gpt,
    protocols.ContextPart: lambda: Ulysses.__new__(Ulysses),
    protocols.OffersJoinedProducts: small_gpt,
    protocols.OffersInitialisation: small_gpt,
    protocols.OffersLoss: build_model,
    protocols.OffersVocabulary: small_gpt,
    protocols.OffersEndTokens: lambda: CausalLanguageModel.__new__(CausalLanguageModel),
    protocols.OffersNotes: lambda: CausalLanguageModel.__new__(CausalLanguageModel),
    protocols.OffersFlopsPerToken: small_gpt,
    protocols.OffersFlopsPerSample: build_model,
    protocols.Task: Masked,
    protocols.OffersCollate: Masked,
    protocols.OffersWeight: Masked,
    protocols.OffersOptimizer: Contrastive,
    protocols.OffersEvaluation: Distillation,
    protocols.OffersTransformersConfig: lambda: Dpo.__new__(Dpo),
    protocols.OffersOwnWeights: lambda: Dpo.__new__(Dpo),
    protocols.OffersStart: lambda: TailAverage(begin=1),
    protocols.OffersStep: lambda: TailAverage(begin=1),
    protocols.OffersEvaluationDone: lambda: Best(figure="accuracy"),
    protocols.OffersEvaluating: lambda: TailAverage(begin=1),
    protocols.OffersCheckpoint: lambda: Best(figure="accuracy"),
    protocols.OffersEnd: lambda: Best(figure="accuracy"),
    protocols.OffersState: lambda: TailAverage(begin=1),
}
"""A row for each Protocol: what returns an object that offers it."""


def protocols_of(module: Any) -> set[type]:
    return {one for _, one in inspect.getmembers(module, inspect.isclass) if getattr(one, "_is_protocol", False)} - {
        protocols.Protocol
    }


def methods_of(protocol: type) -> dict[str, inspect.Signature]:
    """The methods that a Protocol has itself, without `self`."""
    own = {name: one for name, one in vars(protocol).items() if inspect.isfunction(one) and not _is_typings(one)}
    return {name: _without_self(one) for name, one in own.items()}


def _is_typings(method: Any) -> bool:
    """Whether `typing` has put it there."""
    return method.__module__ == "typing"


def _without_self(method: Any) -> inspect.Signature:
    signature = inspect.signature(method)
    return signature.replace(parameters=list(signature.parameters.values())[1:])


def misfits(offering: Any, protocol: type) -> list[str]:
    """What the object does not offer as the Protocol has it: a method that is missing, or takes other arguments."""
    found = []
    for name, wanted in methods_of(protocol).items():
        method = getattr(offering, name, None)
        positional = [one for one in wanted.parameters.values() if one.kind is not one.KEYWORD_ONLY]
        keywords = {one.name: one for one in wanted.parameters.values() if one.kind is one.KEYWORD_ONLY}
        try:
            inspect.signature(method).bind(*positional, **keywords)  # type: ignore[arg-type]
        except TypeError as error:
            found.append(f"{name}: {error}")
    return found


def test_every_protocol_has_a_row() -> None:
    assert protocols_of(protocols) == OFFERED.keys()
    assert all(methods_of(protocol) for protocol in OFFERED)


@pytest.mark.parametrize("protocol", OFFERED, ids=lambda protocol: protocol.__name__)
def test_its_object_offers_what_the_protocol_says(protocol: type) -> None:
    assert misfits(OFFERED[protocol](), protocol) == []


class Wrong(NamedTuple):
    """Offers no `state_dict`, and a `collate` of other arguments."""

    def collate(self) -> None: ...

    def load_state_dict(self, state_dict: object) -> None: ...


def test_what_is_missing_or_takes_other_arguments_is_found() -> None:
    assert [one.partition(":")[0] for one in misfits(Wrong(), protocols.OffersState)] == ["state_dict"]
    assert misfits(Wrong(), protocols.OffersCollate) == ["collate: too many positional arguments"]
