"""`job.json`: what every rank of a job reads. The operator writes it into the job's Secret once."""

from disttrain_api.base import ApiModel
from disttrain_api.parallelism import Parallelism
from disttrain_api.training import Training


class JobConfig(ApiModel):
    """All that a rank needs besides its environment."""

    name: str
    namespace: str
    uid: str
    parallelism: Parallelism
    training: Training
    checkpoint_folder: str
    """Name of the folder below DISTTRAIN_STORAGE that holds `step-N` folders and the fence."""
