from solution import ternarize


def test_import():
    assert ternarize is not None
