"""Which silent servers are given up, and when: beat by beat, without a server."""

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest

from disttrain_trainer.parameter_server.worker.failure_detector import BEATS_TO_RECONNECT, SILENT_BEATS, FailureDetector

PATIENCE = 600
# What is at the server's address when it is connected to anew, and whether a connection ends when it goes.
THERE, REFUSES, DROPS = "there", "refuses", "drops"


def known() -> FailureDetector:
    """A server that has answered and is connected."""
    detector = FailureDetector(PATIENCE, replaceable=True, listening=True)
    detector.end()
    return detector


def given_up_after(
    detector: FailureDetector, places: Iterator[str], answers: Callable[[int], bool] = lambda beat: False
) -> int:
    """Beats until the server is given up, or PATIENCE twice."""
    for beat in range(1, 2 * PATIENCE):
        place = next(places)
        if place == REFUSES:
            detector.listening = False
        # A connection that was made before is dropped without a word; only a new one shows it.
        if detector.beat() or not detector.listening:
            detector.listening = place == THERE
        if answers(beat):
            detector.end()
        if detector.failed:
            return beat
    return 2 * PATIENCE


def test_one_that_is_there_and_hangs_is_given_up_soon():
    looks = SILENT_BEATS // BEATS_TO_RECONNECT
    assert SILENT_BEATS <= given_up_after(known(), repeat(THERE)) <= SILENT_BEATS + looks


@pytest.mark.parametrize("away", [REFUSES, DROPS])
def test_one_that_is_away_is_waited_for_with_patience(away):
    assert given_up_after(known(), repeat(away)) == PATIENCE


@pytest.mark.parametrize("away", [REFUSES, DROPS])
@pytest.mark.parametrize("absence", [SILENT_BEATS - 1, SILENT_BEATS, SILENT_BEATS + 25, PATIENCE - SILENT_BEATS])
def test_one_that_comes_back_late_has_time_for_its_first_answer(away, absence):
    places = chain(repeat(away, absence), repeat(THERE))
    answered = absence + SILENT_BEATS // 2
    assert given_up_after(known(), places, lambda beat: beat >= answered) == 2 * PATIENCE


def test_one_that_comes_back_and_hangs_is_given_up_soon_after():
    absence = 100
    end = given_up_after(known(), chain(repeat(REFUSES, absence), repeat(THERE)))
    assert absence + SILENT_BEATS <= end <= absence + SILENT_BEATS + 2 * BEATS_TO_RECONNECT


def test_what_it_ignored_before_an_answer_does_not_count():
    assert given_up_after(known(), repeat(THERE), lambda beat: beat % (SILENT_BEATS - 5) == 0) == 2 * PATIENCE


@pytest.mark.parametrize("place", [THERE, REFUSES, DROPS])
def test_one_that_cannot_be_replaced_is_given_up_wherever_it_is(place):
    detector = FailureDetector(PATIENCE, replaceable=False, listening=True)
    detector.end()
    assert given_up_after(detector, repeat(place)) == SILENT_BEATS


@pytest.mark.parametrize("place", [THERE, REFUSES])
@pytest.mark.parametrize("replaceable", [True, False])
def test_the_first_answer_may_take_all_of_the_patience(place, replaceable):
    assert given_up_after(FailureDetector(PATIENCE, replaceable), repeat(place)) == PATIENCE


def test_a_short_patience_is_no_less_than_what_a_server_that_hangs_has():
    assert given_up_after(FailureDetector(5, replaceable=True), repeat(REFUSES)) == SILENT_BEATS
