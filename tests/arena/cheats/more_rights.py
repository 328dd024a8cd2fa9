# attack: become another user, or root
# defence: no capability, no set-user-id program, no_new_privs
# expect: fail
# succeeds-at: process
# uses: solve_with_loot

import os

LOOT = os.getuid() == 0
for attempt in (lambda: os.setuid(0), lambda: os.setgid(0), lambda: os.chroot("/"), lambda: os.chown("/tmp", 0, 0)):
    try:
        attempt()
        LOOT = True
    except OSError:
        pass
for program in ("/usr/bin/sudo", "/usr/bin/su", "/bin/mount"):
    try:
        open(program, "rb").close()
        LOOT = True
    except OSError:
        pass
