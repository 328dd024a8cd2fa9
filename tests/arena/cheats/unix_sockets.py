# attack: talk to a daemon of the system
# defence: no socket can be made, and none is in the file system
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import socket

LOOT = False
for address in ("/var/run/docker.sock", "/run/dbus/system_bus_socket", "\0anything"):
    try:
        socket.socket(socket.AF_UNIX)
        LOOT = True
    except OSError:
        pass
