# attack: raise one's own limits again
# defence: soft and hard limits are set together
# expect: fail
# succeeds-without: hard-limits
# uses: loot

import resource

try:
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    LOOT = True
except (OSError, ValueError):
    LOOT = False
