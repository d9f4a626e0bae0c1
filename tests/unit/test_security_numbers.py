"""The numbers that docs/security.md promises are those of the code: other tests hold bounds, and call them by name."""

import pytest
import yaml

from disttrain_api.manifest import MAX_BYTES
from disttrain_api.yaml_bounds import MAX_DEPTH, MAX_VALUES
from disttrain_operator import connection_limits, pod_events
from disttrain_operator.kube import budget, large_events, lists, sizes
from tools.cluster.paths import REPOSITORY

KIB = 1024
SENTENCES = {
    "Events of pods": f"at most {pod_events.MAX_EVENTS} Events and {pod_events.MAX_BYTES // KIB} KiB for a pod",
    "rate": f"at most {pod_events.MOST} such requests in {'five' if pod_events.ROUND_SECONDS == 5 else '?'} seconds",
    "share": f"that of a namespace by a {'third' if budget.SHARES == 3 else '?'} of it",
    "manifests": f"{MAX_BYTES // KIB**2} MiB, {MAX_VALUES:,} values and {MAX_DEPTH} levels at most",
}


@pytest.mark.parametrize("sentence", SENTENCES.values(), ids=SENTENCES)
def test_a_number_of_the_page_is_the_codes(sentence: str) -> None:
    """Red where a bound is changed in the code alone, or on the page alone."""
    assert sentence in (REPOSITORY / "docs/security.md").read_text()


def test_the_port_of_health_has_bounds() -> None:
    """The page says that there are: red where they would be worth nothing."""
    limits = connection_limits.Limits()
    assert limits.connections * limits.bytes <= 8 * KIB**2
    assert limits.seconds <= 60


def test_what_the_operator_may_hold_at_once_fits_the_charts_limit_beside_itself() -> None:
    """What is kept, what waits, what is parsed and one page's text. Red where one of the bounds grows alone."""
    most = budget.KEPT_BYTES + large_events.MAX_WAITING_BYTES + sizes.MAX_PARSED_BYTES + 4 * lists.MAX_PAGE_BYTES
    values = yaml.safe_load((REPOSITORY / "helm/disttrain/values.yaml").read_text())
    limit = values["resources"]["limits"]["memory"]
    assert limit.endswith("Mi")
    assert most <= (int(limit.removesuffix("Mi")) - 128) * KIB**2
