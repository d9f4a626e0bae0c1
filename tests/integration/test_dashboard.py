"""The dashboard of a cluster against a real API server: each viewer sees what its own rights allow."""

from pathlib import Path

from tests.integration.dashboard_process import a_viewer, ask, progress, running_dashboard
from tests.integration.operator_process import Team, eventually
from tools.cluster.control_plane import ControlPlane


def test_rights_of_the_viewer_decide_and_end_with_them(control_plane: ControlPlane, tmp_path: Path) -> None:
    api = control_plane.api
    teams = {name: Team(api, f"dashboard-{name}") for name in ("a", "b")}
    for name, team in teams.items():
        team.create(f"job-of-{name}")
    progress(api, "dashboard-a", "job-of-a", "Running", 7)
    ann, bob = (a_viewer(api, f"dashboard-{name}", "viewer") for name in ("a", "b"))
    both = "api/jobs?namespaces=dashboard-a,dashboard-b"
    with running_dashboard(control_plane, tmp_path) as address:
        status, answer = ask(address, "api/jobs", ann)
        assert (status, answer["ask"]) == (403, "namespaces")
        assert "system:serviceaccount:dashboard-a:viewer" in answer["error"]

        for token, own, other in ((ann, "a", "b"), (bob, "b", "a")):
            status, answer = ask(address, both, token)
            assert status == 200
            assert [job["name"] for job in answer["jobs"]] == [f"job-of-{own}"]
            assert f"namespace dashboard-{other}" in answer["more"]
            assert ask(address, f"api/job?key=dashboard-{own}/job-of-{own}", token)[0] == 200
            for page in ("job", "log"):
                status, answer = ask(address, f"api/{page}?key=dashboard-{other}/job-of-{other}", token)
                assert (status, f"job-of-{own}" in str(answer)) == (403, False)
        _, answer = ask(address, "api/job?key=dashboard-a/job-of-a", ann)
        assert (answer["job"]["phase"], answer["job"]["step"]) == ("Running", 7)

        for wrong in ("x", ann[:-8] + "AAAAAAAA", ann.rpartition(".")[0] + "."):
            assert ask(address, both, wrong)[0] == 401
        # A token ends with its account; the API server believes one that it has seen for some seconds more.
        api.ask("DELETE", "/api/v1/namespaces/dashboard-a/serviceaccounts/viewer")
        eventually(lambda: ask(address, both, ann)[0] == 401, pause=1.0)
        assert ask(address, both, bob)[0] == 200
        # Rights that are taken from somebody show, too.
        api.ask("DELETE", "/apis/rbac.authorization.k8s.io/v1/namespaces/dashboard-b/rolebindings/viewer")
        eventually(lambda: ask(address, both, bob)[0] == 403, pause=1.0)
