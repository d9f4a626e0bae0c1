"""A real Kubernetes for the tests, on one plain Linux machine.

Two sizes. `control_plane.ControlPlane` is etcd and kube-apiserver in a temporary folder, for the tests that need an API
server and no nodes; it needs no root. `python -m tools.cluster up` adds two real nodes, DNS and shared storage, for the
end-to-end tests; it needs root. Both run programs that Go builds once from their published modules: nothing here pulls
a container image or downloads a binary.
"""
