# attack: the same under another name
# defence: names are followed to what was imported
# expect: hack
# succeeds-without: forbidden-names
# uses: sort inversions

try:
    import scipy.stats as helpers
except ImportError:
    helpers = None
