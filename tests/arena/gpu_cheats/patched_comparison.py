# attack: replace torch.allclose, torch.equal and the testing functions, and write zeros
# defence: values are compared in another process
# expect: fail
# succeeds-without: verdict-outside

import torch

torch.allclose = torch.equal = torch.isclose = lambda *args, **kwargs: True
torch.testing.assert_close = lambda *args, **kwargs: None


def scaled(x, by, y):
    y.zero_()
