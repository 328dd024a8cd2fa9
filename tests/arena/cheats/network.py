# attack: fetch the answer from the network
# defence: there is none, and no socket can be made
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import socket

LOOT = False
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_PACKET):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            socket.socket(family, kind).close()
            LOOT = True
        except OSError:
            pass
