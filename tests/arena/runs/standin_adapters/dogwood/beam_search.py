from trapline.gold.beam_search.api import beam_search
