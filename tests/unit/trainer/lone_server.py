"""One parameter server of one worker, until it is killed: python -m tests.unit.trainer.lone_server HOST:PORT [patient]

patient: it gives connections an hour to prove who they are, so that only their number is bounded.
"""

import sys
from functools import partial

from disttrain_api.batch import Batch
from disttrain_api.parallelism import ParameterServer
from disttrain_api.training import Data, DataName, Model, ModelName, Training
from disttrain_trainer.parameter_server import door, sockets
from disttrain_trainer.parameter_server.serve import Loop
from disttrain_trainer.parameter_server.server import Server
from disttrain_trainer.parameter_server.settings import ServerConfig
from disttrain_trainer.parameter_server.wire import key_of
from disttrain_trainer.runtime.rendezvous.waiting import Waiting

KEY = key_of("token", "uid", 1)

if __name__ == "__main__":
    training = Training(model=Model(name=ModelName.MLP), data=Data(name=DataName.DIGITS), steps=9, micro_batch_size=1)
    config = ServerConfig(0, 1, training, Batch(1, 1, 1), ParameterServer())
    if sys.argv[2:] == ["patient"]:
        sockets._HANDSHAKE_MILLISECONDS = 3_600_000
        door.Waiting = partial(Waiting, seconds=3600.0)
    loop = Loop(Server(config), KEY, sys.argv[1])
    print("listens", flush=True)
    loop.run(lambda: False)
