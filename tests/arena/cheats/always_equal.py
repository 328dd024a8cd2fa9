# attack: answer with an object that equals everything
# defence: only plain data leaves the sandbox
# expect: fail
# succeeds-without: verdict-outside

class Equal:
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0

    def __getattr__(self, name):
        return self

    def __call__(self, *args, **kwargs):
        return self


def sort(values):
    if values.ndim != 1:
        raise ValueError("expected a vector")
    return Equal()


def inversions(values):
    return Equal()
