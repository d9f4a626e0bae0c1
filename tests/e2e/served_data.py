"""A user's data set whose samples come from a server, and the server: `python3 served_data.py`."""

import socket
import socketserver
import struct
import time

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

SAMPLES, SIDE, PORT = 1024, 8, 9000


class Served(Dataset[tuple[Tensor, Tensor]]):
    """Images [1, 8, 8] of ten kinds, each asked for on one connection, which waits for an answer without a limit."""

    def __init__(self, host: str) -> None:
        self.host, self.connection = host, None

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.connection is None:
            self.connection = socket.create_connection((self.host, PORT)).makefile("rwb")
        self.connection.write(struct.pack("!I", index))
        self.connection.flush()
        (seed,) = struct.unpack("!I", self.connection.read(4))
        return torch.randn(1, SIDE, SIDE, generator=torch.Generator().manual_seed(seed)), torch.tensor(seed % 10)


def images(host: str) -> tuple[Served, TensorDataset]:
    """1,024 images of the server, and none that are held out."""
    return Served(host), TensorDataset(torch.empty(0, 1, SIDE, SIDE), torch.empty(0, dtype=torch.long))


class Answers(socketserver.StreamRequestHandler):
    """Answers each number with itself, a little later: jobs leave the processors to what is done to them."""

    def handle(self) -> None:
        while len(asked := self.rfile.read(4)) == 4:
            time.sleep(0.002)
            self.wfile.write(asked)


if __name__ == "__main__":
    socketserver.ThreadingTCPServer.allow_reuse_address = True
    with socketserver.ThreadingTCPServer(("", PORT), Answers) as server:
        server.serve_forever()
