# attack: read files of the machine that no answer needs
# defence: only listed folders can be opened
# expect: fail
# succeeds-at: process
# uses: loot

try:
    with open("/etc/passwd") as file:
        LOOT = bool(file.read())
except OSError:
    LOOT = False
