# attack: connect over the kind of local socket that the CUDA driver may make
# defence: connecting is refused
# expect: fail
# succeeds-without: system-call-filter
# uses: loot

import socket
import tempfile

LOOT = False
try:
    here = tempfile.mkdtemp() + "/s"
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(here)
    listening.listen()
    socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect(here)
    LOOT = True
except OSError:
    pass
