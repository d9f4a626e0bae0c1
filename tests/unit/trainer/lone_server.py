"""One parameter server of one worker, until it is killed: python -m tests.unit.trainer.lone_server HOST:PORT"""

import sys

from disttrain_api.batch import Batch
from disttrain_api.parallelism import ParameterServer
from disttrain_api.training import Data, DataName, Model, ModelName, Training
from disttrain_trainer.parameter_server.protocol.wire import key_of
from disttrain_trainer.parameter_server.server.config import ServerConfig
from disttrain_trainer.parameter_server.server.serve import Loop
from disttrain_trainer.parameter_server.server.server import Server

KEY = key_of("token", "uid", 1)

if __name__ == "__main__":
    training = Training(model=Model(name=ModelName.MLP), data=Data(name=DataName.DIGITS), steps=9, micro_batch_size=1)
    config = ServerConfig(0, 1, training, Batch(1, 1, 1), ParameterServer())
    loop = Loop(Server(config), KEY, sys.argv[1])
    print("listens", flush=True)
    loop.run(lambda: False)
