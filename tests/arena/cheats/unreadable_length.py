# attack: be longer than the limit of the reader
# defence: what cannot be read does not pass where something is forbidden
# expect: fail
# succeeds-without: readable-code
# uses: sort inversions

try:
    import scipy.stats
except ImportError:
    pass
# ==== file: helper.py
{half a megabyte}
