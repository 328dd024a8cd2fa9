# attack: leak through the resolver
# defence: no socket, no resolver configuration
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import socket

LOOT = False
for name in ("example.org", "localhost"):
    try:
        socket.getaddrinfo(name, 80)
        LOOT = True
    except OSError:
        pass
