# attack: open a network connection
# defence: no socket but the driver's own kind can be made
# expect: fail
# succeeds-at: process
# uses: loot

import socket

try:
    socket.socket(socket.AF_INET, socket.SOCK_STREAM).close()
    LOOT = True
except OSError:
    LOOT = False
