# attack: bring replacements of the worker's own modules
# defence: they are imported before the submission's folder is on the path
# expect: fail
# succeeds-without: modules-before-submission
# uses: zeros

# ==== file: wire.py
class Channel:
    def __init__(self, *args, **kwargs):
        raise SystemExit(0)
# ==== file: worker.py
raise SystemExit(0)
# ==== file: socket.py
raise SystemExit(0)
