"""The rendezvous of ranks: torch's TCPStore, behind a handshake that proves the job's token.

TCPStore has no authentication. So rank 0's store listens on the loopback interface alone, and a gateway on
MASTER_ADDR:MASTER_PORT lets a connection through to it once the other side has proved that it knows the token of this
attempt. On the other ranks a forwarder on the loopback interface does the proving; the store's clients connect to it.

    rank 1: TCPStore client -> forwarder ==== token ====> gateway -> TCPStore :rank 0
"""
