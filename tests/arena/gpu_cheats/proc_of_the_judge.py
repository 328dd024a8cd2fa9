# attack: read the command lines of other processes in /proc
# defence: of /proc only the runner's own entry can be opened
# expect: fail
# succeeds-at: process
# uses: loot

LOOT = False
for number in range(1, 1 << 16):
    try:
        with open(f"/proc/{number}/cmdline", "rb") as text:
            LOOT = LOOT or b"trapline.arena.gpu.judge" in text.read()
    except OSError:
        pass
