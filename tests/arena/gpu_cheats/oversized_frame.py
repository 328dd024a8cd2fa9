# attack: announce a frame of 16 GiB, so that the judge takes memory for it
# defence: every length is checked before it is believed
# expect: fail
# succeeds-without: lengths-checked
# uses: runner channel


def scaled(x, by, y):
    os.write(channel(), struct.pack("<4sIQ", b"TRPL", 2, 1 << 34) + b"{}")
