from pathlib import Path

from tools.cluster.mounts import listed_below

STATE = Path("/var/state/cluster")
MOUNTINFO = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
90 22 0:40 / /var/state/cluster/node1/kubelet/pods/1/volumes/x rw - tmpfs tmpfs rw
91 22 0:41 / /var/state/cluster/node1/run/with\\040space rw - overlay overlay rw
92 22 0:42 / /var/state/cluster-of-another rw - tmpfs tmpfs rw
"""


def test_only_mounts_below_the_state_folder_are_ours():
    assert listed_below(MOUNTINFO, STATE) == [
        "/var/state/cluster/node1/kubelet/pods/1/volumes/x",
        "/var/state/cluster/node1/run/with space",
    ]
